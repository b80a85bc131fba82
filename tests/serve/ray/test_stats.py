"""Sums of the metrics of replicas."""

from __future__ import annotations

from llamacli.serve.metrics import Counters, LoadStats, SlotStats
from llamacli.serve.ray.stats import Totals, total


def stats(n: int, *, running: int = 0) -> object:
    counters = Counters()
    counters.generation_tokens += n
    counters.finished["stop"] += n
    counters.observe("step_seconds", 0.1 * n)
    return counters.snapshot(running=running, slots=(SlotStats(str(n), "decode", 1, 0, 1, 0.0),) * running)


def test_numbers_counts_and_histograms_are_added() -> None:
    both = total([stats(1, running=1), stats(2, running=1)])
    assert (both.generation_tokens, both.running) == (3, 2)
    assert both.finished == {"stop": 3}
    assert [slot.id for slot in both.slots] == ["1", "2"]
    step = both.histograms["step_seconds"]
    assert (sum(step.counts), round(step.sum, 9)) == (2, 0.3)
    assert total([]).histograms == {}


def test_counters_stay_when_a_replica_has_gone() -> None:
    totals = Totals()
    totals.update("a", stats(5, running=2), LoadStats(1, 1, 8))
    totals.update("b", stats(1, running=1), LoadStats(1, 0, 4))
    totals.update("b", stats(2, running=1), LoadStats(2, 0, 4))
    assert totals.sum().generation_tokens == 7
    totals.keep(["b"])
    left = totals.sum()
    assert (left.generation_tokens, left.running, len(left.slots)) == (7, 1, 1)
    assert sum(left.histograms["step_seconds"].counts) == 2
    assert totals.loads() == LoadStats(3, 1, 4)
    totals.keep(["b"])
    totals.update("c", stats(1), LoadStats())
    assert totals.sum().generation_tokens == 8

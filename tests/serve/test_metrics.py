"""Counters and histograms of the engine."""

import pytest

from llamacli.serve.metrics import HISTOGRAMS, Counters, Histogram


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.1, 1), (2.0, 1), (9.0, 2)])
def test_values_at_a_bound_belong_below_it(value: float, bucket: int) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    found = histogram.snapshot()
    assert found.counts == tuple(int(i == bucket) for i in range(3))
    assert (found.bounds, found.sum) == ((1.0, 2.0), value)


def test_snapshot_does_not_change_later() -> None:
    counters = Counters()
    counters.observe("step_rows", 5)
    counters.finished["stop"] += 1
    found = counters.snapshot(running=3)
    counters.observe("step_rows", 5)
    counters.finished["stop"] += 1
    assert (found.running, found.finished, sum(found.histograms["step_rows"].counts)) == (3, {"stop": 1}, 1)


def test_bounds_ascend() -> None:
    for bounds in HISTOGRAMS.values():
        assert list(bounds) == sorted(set(bounds))

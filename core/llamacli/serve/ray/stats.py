"""Sums of the metrics of replicas that come and go."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from llamacli.serve.metrics import HistogramStats, LoadStats, ModelStats

_GAUGES = ("running", "waiting", "prompt_tokens_waiting", "kv_pages_used", "kv_pages_total", "kv_pages_cached")
_COUNTERS = ("prompt_tokens", "generation_tokens", "drafts", "draft_tokens", "draft_tokens_accepted", "preemptions")
_LABELLED = ("prefix_tokens", "cancelled", "refused", "finished")


def total(parts: Iterable[ModelStats]) -> ModelStats:
    """Sum of the numbers of several replicas; slots are joined."""
    parts = list(parts)
    numbers: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in (*_GAUGES, *_COUNTERS)}
    numbers["n_tokens_max"] = max((part.n_tokens_max for part in parts), default=0)
    numbers |= {name: _joined(getattr(part, name) for part in parts) for name in _LABELLED}
    names = dict.fromkeys(name for part in parts for name in part.histograms)
    histograms = {
        name: _histogram([part.histograms[name] for part in parts if name in part.histograms]) for name in names
    }
    slots = tuple(slot for part in parts for slot in part.slots)
    return ModelStats(**numbers, histograms=histograms, slots=slots)


class Totals:
    """Sum over replicas that come and go.

    The counters of one that has gone stay in the sum, as those of Prometheus must not fall.
    """

    def __init__(self) -> None:
        self._present: dict[str, tuple[ModelStats, LoadStats]] = {}
        self._past, self._past_loads = ModelStats(), LoadStats()

    def update(self, replica: str, stats: ModelStats, loads: LoadStats) -> None:
        """Take the present numbers of a replica."""
        self._present[replica] = stats, loads

    def keep(self, replicas: Iterable[str]) -> None:
        """Set which replicas there are."""
        present = set(replicas)
        for name in [name for name in self._present if name not in present]:
            no_gauges: dict[str, Any] = dict.fromkeys(_GAUGES, 0)
            stats, loads = self._present.pop(name)
            self._past = total([self._past, attrs.evolve(stats, slots=(), **no_gauges)])
            self._past_loads = _total_loads([self._past_loads, attrs.evolve(loads, n_bytes=0)])

    def sum(self) -> ModelStats:
        """The present sum."""
        return total([self._past, *(stats for stats, _ in self._present.values())])

    def loads(self) -> LoadStats:
        """The present sum of loads."""
        return _total_loads([self._past_loads, *(loads for _, loads in self._present.values())])


def _total_loads(parts: list[LoadStats]) -> LoadStats:
    return LoadStats(*(sum(numbers) for numbers in zip(*map(attrs.astuple, parts), strict=True)))


def _joined(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for one in counts:
        found.update(one)
    return dict(found)


def _histogram(parts: list[HistogramStats]) -> HistogramStats:
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return HistogramStats(parts[0].bounds, counts, sum(part.sum for part in parts))

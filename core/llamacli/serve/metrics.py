"""Counters and histograms of the engine, and their snapshot for `/metrics`."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping
from typing import Any

import attrs

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
"""Bounds of histograms of times of requests, in seconds (vLLM's)."""
TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5)
"""Bounds of histograms of times per token or step, in seconds (vLLM's)."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Bounds of histograms of numbers of tokens."""

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_seconds": TOKEN_SECONDS,
    "request_time_per_output_token_seconds": TOKEN_SECONDS,
    "queue_seconds": SECONDS,
    "prefill_seconds": SECONDS,
    "decode_seconds": SECONDS,
    "e2e_seconds": SECONDS,
    "step_seconds": TOKEN_SECONDS,
    "step_rows": COUNTS[:10],
    "step_sequences": COUNTS[:10],
    "prompt_tokens": COUNTS,
    "output_tokens": COUNTS,
}
"""Histograms of a model by name, with the upper bounds of their buckets."""


class Histogram:
    """Histogram with fixed buckets; a value at a bound is below it."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> HistogramStats:
        """The present counts."""
        return HistogramStats(self.bounds, tuple(self.counts), self.sum)


@attrs.frozen
class HistogramStats:
    """Counts of a histogram.

    `counts` has one number for each of the ascending `bounds`, of values above the bound before, and one of values
    above the last. They are not cumulative.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@attrs.frozen
class SlotStats:
    """Request that runs: counts of tokens, no text.

    `state` is "prefill", "decode" or "preempted".
    """

    id: str
    state: str
    n_prompt: int
    n_cached: int
    n_generated: int
    seconds: float


@attrs.frozen
class ModelStats:
    """Numbers of all loads of a model, named as its metrics.

    `n_tokens_max` is the length of the longest text, with its prompt.

    Counters by label: `prefix_tokens` by "hit" ("true" or "false"), `cancelled` by phase ("waiting", "prefill",
    "decode", "preempted"), `refused` by error code, `finished` by reason.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    kv_pages_cached: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    n_tokens_max: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    preemptions: int = 0
    prefix_tokens: Mapping[str, int] = attrs.field(factory=dict)
    cancelled: Mapping[str, int] = attrs.field(factory=dict)
    refused: Mapping[str, int] = attrs.field(factory=dict)
    finished: Mapping[str, int] = attrs.field(factory=dict)
    histograms: Mapping[str, HistogramStats] = attrs.field(factory=dict)
    slots: tuple[SlotStats, ...] = ()


@attrs.frozen
class LoadStats:
    """Loads of a model that succeeded and failed.

    `n_bytes` is the memory that it may take now.
    """

    loads: int = 0
    failures: int = 0
    n_bytes: int = 0


@attrs.frozen
class EngineStats:
    """Numbers of the engine.

    `status` is "ok", "loading" (no model can run yet), "stage_lost" (none can run, as one has lost a worker),
    "draining" or "stuck" (no step for too long while requests run). `models` has those that are or were loaded, by
    name, `loads` all.
    """

    status: str
    models: Mapping[str, ModelStats]
    loads: Mapping[str, LoadStats] = attrs.field(factory=dict)


class Counters:
    """Counters and histograms of one model; the names are those of ModelStats."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.preemptions = 0
        self.drafts = self.draft_tokens = self.draft_tokens_accepted = self.n_tokens_max = 0
        self.prefix_tokens: collections.Counter[str] = collections.Counter(true=0, false=0)
        self.cancelled: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}

    def observe(self, name: str, value: float) -> None:
        """Count a value in a histogram of HISTOGRAMS."""
        self._histograms[name].observe(value)

    def snapshot(self, **gauges: Any) -> ModelStats:
        """The present numbers, with the gauges given."""
        return ModelStats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            n_tokens_max=self.n_tokens_max,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            draft_tokens_accepted=self.draft_tokens_accepted,
            preemptions=self.preemptions,
            prefix_tokens=dict(self.prefix_tokens),
            cancelled=dict(self.cancelled),
            refused=dict(self.refused),
            finished=dict(self.finished),
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
            **gauges,
        )

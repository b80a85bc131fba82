"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from llamacli.serve.metrics import EngineStats, HistogramStats, ModelStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_GAUGES = {
    "running": ("requests_running", "Requests that run."),
    "waiting": ("requests_waiting", "Requests in the queue."),
    "prompt_tokens_waiting": ("prompt_tokens_waiting", "Prompt tokens of requests in the queue."),
    "kv_pages_used": ("kv_pages_used", "Pages of the KV cache in use."),
    "kv_pages_total": ("kv_pages_total", "Pages that the KV cache may have."),
    "n_tokens_max": ("text_tokens_max", "Tokens of the longest text, with its prompt."),
    "kv_pages_cached": ("kv_pages_cached", "Pages of the KV cache that are kept for later prompts."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens evaluated."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "drafts": ("drafts", "Drafts of speculative decoding."),
    "draft_tokens": ("draft_tokens", "Tokens drafted by speculative decoding."),
    "draft_tokens_accepted": ("draft_tokens_accepted", "Drafted tokens that came."),
    "preemptions": ("preemptions", "Requests that gave up their cache for others."),
}
_LABELLED = {
    "prefix_tokens": ("prefix_tokens", "hit", "Prompt tokens by whether the prefix cache had them."),
    "cancelled": ("cancelled", "phase", "Requests cancelled, by phase."),
    "refused": ("refused", "code", "Requests refused, by error code."),
    "finished": ("finished", "finish_reason", "Choices that ended, by reason."),
}
_LLAMACPP: dict[str, tuple[str, str, Callable[[ModelStats], float]]] = {
    "prompt_tokens_total": ("counter", "Prompt tokens evaluated.", lambda one: one.prompt_tokens),
    "prompt_tokens_cached_total": (
        "counter", "Prompt tokens from the cache.", lambda one: one.prefix_tokens.get("true", 0)
    ),
    "prompt_seconds_total": ("counter", "Time of prompts.", lambda one: _sum(one, "prefill_seconds")),
    "tokens_predicted_total": ("counter", "Tokens generated.", lambda one: one.generation_tokens),
    "tokens_predicted_seconds_total": ("counter", "Time of generation.", lambda one: _sum(one, "decode_seconds")),
    "n_decode_total": ("counter", "Steps.", lambda one: _count(one, "step_seconds")),
    "n_tokens_max": ("counter", "Length of the longest text.", lambda one: one.n_tokens_max),
    "spec_decode_num_drafts_total": ("counter", "Drafts.", lambda one: one.drafts),
    "spec_decode_num_draft_tokens_total": ("counter", "Tokens drafted.", lambda one: one.draft_tokens),
    "spec_decode_num_accepted_tokens_total": (
        "counter", "Drafted tokens that came.", lambda one: one.draft_tokens_accepted
    ),
    "prompt_tokens_seconds": (
        "gauge", "Prompt tokens per second.", lambda one: _ratio(one.prompt_tokens, _sum(one, "prefill_seconds"))
    ),
    "predicted_tokens_seconds": (
        "gauge", "Tokens generated per second.", lambda one: _ratio(one.generation_tokens, _sum(one, "decode_seconds"))
    ),
    "requests_processing": ("gauge", "Requests that run.", lambda one: one.running),
    "requests_deferred": ("gauge", "Requests in the queue.", lambda one: one.waiting),
    "n_busy_slots_per_decode": (
        "gauge", "Texts in a step.", lambda one: _ratio(_sum(one, "step_sequences"), _count(one, "step_sequences"))
    ),
}  # fmt: skip
"""Kind, help and value of metrics of llama-server, without its prefix, from the numbers of a model."""
_LOADS = {
    "loads": ("model_loads", "Loads of a model."),
    "failures": ("model_load_failures", "Loads of a model that failed."),
    "n_bytes": ("model_bytes", "Memory of a loaded model's weights, and of its cache when that is full."),
}
_LARGEST = ("n_tokens_max", "n_busy_slots_per_decode")
"""Those of which the model with the largest counts; others are sums."""


class HttpMetrics:
    """Metrics of the HTTP layer.

    Requests by endpoint and status, and the delay of the event loop. `started` is in seconds since 1970.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.registry = CollectorRegistry()
        labels = ["endpoint", "status", "finish_reason"]
        self._requests = Counter("llamacli_requests", "Requests by outcome.", labels, registry=self.registry)
        self._key_requests = Counter(
            "llamacli_key_requests", "Requests by key.", ["key", "status"], registry=self.registry
        )
        self._key_tokens = Counter("llamacli_key_tokens", "Tokens by key.", ["key", "kind"], registry=self.registry)
        self._lag = Histogram(
            "llamacli_loop_lag_seconds", "Delay of the event loop.", buckets=LAG_SECONDS, registry=self.registry
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def count(self, endpoint: str, status: int | None, finish_reason: str, key: str | None = None) -> None:
        """Count a request, by the name of its key too.

        A status of None is a client that left before its response; `finish_reason` is "" where no text was generated.
        """
        shown = "disconnected" if status is None else str(status)
        self._requests.labels(endpoint, shown, finish_reason).inc()
        if key is not None:
            self._key_requests.labels(key, shown).inc()

    def count_tokens(self, key: str, kind: str, n: int) -> None:
        """Count tokens of a key's prompts ("prompt") or replies ("generated")."""
        self._key_tokens.labels(key, kind).inc(n)

    def observe_lag(self, seconds: float) -> None:
        """Count a delay of the event loop."""
        self._lag.observe(seconds)


class EngineCollector(Collector):
    """Collector of the engine's numbers, by model."""

    def __init__(self, stats: EngineStats):
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Metrics of one scrape."""
        models = self._stats.models
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"llamacli_{name}", text, labels=["model"])
            for model, one in models.items():
                gauge.add_metric([model], getattr(one, field))
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"llamacli_{name}", text, labels=["model"])
            for model, one in models.items():
                counter.add_metric([model], getattr(one, field))
            yield counter
        for field, (name, label, text) in _LABELLED.items():
            counter = CounterMetricFamily(f"llamacli_{name}", text, labels=["model", label])
            for model, one in models.items():
                for value, count in getattr(one, field).items():
                    counter.add_metric([model, value], count)
            yield counter
        for field, (name, text) in _LOADS.items():
            kind = GaugeMetricFamily if field == "n_bytes" else CounterMetricFamily
            family = kind(f"llamacli_{name}", text, labels=["model"])
            for model, load in self._stats.loads.items():
                family.add_metric([model], getattr(load, field))
            yield family
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        names = dict.fromkeys(itertools.chain.from_iterable(one.histograms for one in self._stats.models.values()))
        for name in names:
            family = HistogramMetricFamily(f"llamacli_{name}", name.replace("_", " "), labels=["model"])
            for model, one in self._stats.models.items():
                if name in one.histograms:
                    stats = one.histograms[name]
                    family.add_metric([model], _buckets(stats), stats.sum)
            yield family


def exposition(stats: EngineStats, http: HttpMetrics, *, llamacpp: bool = False) -> bytes:
    """Text of one scrape."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats))
    text = generate_latest(registry) + generate_latest(http.registry)
    return text + "".join(_llamacpp_lines(stats)).encode() if llamacpp else text


def _llamacpp_lines(stats: EngineStats) -> Iterator[str]:
    """Lines of a scrape under llama-server's names."""
    for name, (kind, text, value) in _LLAMACPP.items():
        numbers = [value(one) for one in stats.models.values()]
        number = float(max(numbers, default=0) if name in _LARGEST else sum(numbers))
        yield f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {number}\n"


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    bounds = [*map(str, stats.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(stats.counts)), strict=True))


def _count(one: ModelStats, name: str) -> int:
    return sum(one.histograms[name].counts) if name in one.histograms else 0


def _sum(one: ModelStats, name: str) -> float:
    return one.histograms[name].sum if name in one.histograms else 0.0


def _ratio(n: float, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0

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
    "kv_pages_cached": ("kv_pages_cached", "Pages of the KV cache that are kept for later prompts."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens evaluated or found in the cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
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
_LLAMACPP: dict[str, Callable[[ModelStats], float]] = {
    "prompt_tokens_total": lambda one: one.prompt_tokens,
    "tokens_predicted_total": lambda one: one.generation_tokens,
    "prompt_seconds_total": lambda one: _sum(one, "prefill_seconds"),
    "tokens_predicted_seconds_total": lambda one: _sum(one, "decode_seconds"),
    "n_decode_total": lambda one: sum(one.histograms["step_seconds"].counts) if "step_seconds" in one.histograms else 0,
    "prompt_tokens_seconds": lambda one: _ratio(one.prompt_tokens, _sum(one, "prefill_seconds")),
    "predicted_tokens_seconds": lambda one: _ratio(one.generation_tokens, _sum(one, "decode_seconds")),
    "requests_processing": lambda one: one.running,
    "requests_deferred": lambda one: one.waiting,
}
"""Metrics of llama-server, without its prefix, from the numbers of a model."""


class HttpMetrics:
    """Metrics of the HTTP layer.

    Requests by endpoint and status, and the delay of the event loop. `started` is in seconds since 1970.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.registry = CollectorRegistry()
        labels = ["endpoint", "status", "finish_reason"]
        self._requests = Counter("llamacli_requests", "Requests by outcome.", labels, registry=self.registry)
        self._lag = Histogram(
            "llamacli_loop_lag_seconds", "Delay of the event loop.", buckets=LAG_SECONDS, registry=self.registry
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def count(self, endpoint: str, status: int | None, finish_reason: str) -> None:
        """Count a request.

        A status of None is a client that left before its response; `finish_reason` is "" where no text was generated.
        """
        shown = "disconnected" if status is None else str(status)
        self._requests.labels(endpoint, shown, finish_reason).inc()

    def observe_lag(self, seconds: float) -> None:
        """Count a delay of the event loop."""
        self._lag.observe(seconds)


class EngineCollector(Collector):
    """Collector of the engine's numbers, by model."""

    def __init__(self, stats: EngineStats, *, llamacpp: bool = False):
        self._stats, self._llamacpp = stats, llamacpp

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
        yield from self._histograms()
        if self._llamacpp:
            yield from self._llamacpp_metrics()

    def _histograms(self) -> Iterator[Metric]:
        names = dict.fromkeys(itertools.chain.from_iterable(one.histograms for one in self._stats.models.values()))
        for name in names:
            family = HistogramMetricFamily(f"llamacli_{name}", name.replace("_", " "), labels=["model"])
            for model, one in self._stats.models.items():
                if name in one.histograms:
                    stats = one.histograms[name]
                    family.add_metric([model], _buckets(stats), stats.sum)
            yield family

    def _llamacpp_metrics(self) -> Iterator[Metric]:
        for name, value in _LLAMACPP.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            family = Metric(f"llamacpp:{name.removesuffix('_total')}", "As llama-server's.", kind)
            family.add_sample(f"llamacpp:{name}", {}, sum(value(one) for one in self._stats.models.values()))
            yield family


def exposition(stats: EngineStats, http: HttpMetrics, *, llamacpp: bool = False) -> bytes:
    """Text of one scrape."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, llamacpp=llamacpp))
    return generate_latest(registry) + generate_latest(http.registry)


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    bounds = [*map(str, stats.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(stats.counts)), strict=True))


def _sum(one: ModelStats, name: str) -> float:
    return one.histograms[name].sum if name in one.histograms else 0.0


def _ratio(n: float, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0

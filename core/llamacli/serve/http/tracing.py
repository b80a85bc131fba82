"""OpenTelemetry traces of requests, by the usual environment variables."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamacli.serve.http.access_log import AccessLine

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

CLOSE_S = 2.0
"""Seconds that the last spans have at the end; a collector that hangs gets no more."""

_ASKED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "seed": "gen_ai.request.seed",
    "prompt": "gen_ai.usage.input_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "generated": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "error": "error.type",
    "key": "llamacli.key",
}
"""Names of the semantic conventions for fields of the access log."""

_log = logging.getLogger(__name__)


class Traces:
    """Spans of requests, and of their queue, prompt and reply.

    They are sent by a thread of the exporter from a queue of limited length: nothing waits for a collector.
    """

    def __init__(self, provider: TracerProvider):
        self._provider = provider
        self._tracer = provider.get_tracer("llamacli")

    def record(self, access: AccessLine, headers: Mapping[str, str]) -> None:
        """Record a request that has ended; `headers` may have a `traceparent`."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended, fields = time.time_ns(), access.fields
        began = ended - int(access.seconds * 1e9)
        attributes: dict[str, Any] = {
            "http.request.method": access.method,
            "url.path": access.path,
            "http.response.status_code": access.status or 499,
            "llamacli.request_id": access.request_id,
            **{name: fields[field] for field, name in _ATTRIBUTES.items() if field in fields},
        }
        parent = TraceContextTextMapPropagator().extract({"traceparent": headers.get("traceparent", "")})
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(
            f"{access.method} {access.path}", parent, kind, attributes=attributes, start_time=began
        )
        inside = trace.set_span_in_context(span, parent)
        for name, start, end in _phases(access, began, ended):
            self._tracer.start_span(name, inside, start_time=start).end(end)
        if access.status is None or access.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end(ended)

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="llamacli-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _phases(access: AccessLine, began: int, ended: int) -> list[tuple[str, int, int]]:
    """Parts of a request with their times in nanoseconds: queue, prompt, reply.

    The queue ends where the access log's field says, counted back from the first token.
    """
    fields = access.fields
    if "ttft" not in fields:
        return []
    first = began + int(fields["ttft"] * 1e9)
    admitted = min(first, began + int(fields.get("queue", 0.0) * 1e9))
    return [("queue", began, admitted), ("prompt", admitted, first), ("reply", first, ended)]


def traces_of_environment(environment: Mapping[str, str] = os.environ) -> Traces | None:
    """Traces by the variables of OpenTelemetry, None without them.

    OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_TRACES_EXPORTER=otlp turn them on, OTEL_SDK_DISABLED=true off. Without the
    packages of the extra `telemetry` the log says so.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if disabled or not (exporter or any(environment.get(name) for name in _ASKED)):
        return None
    if exporter not in ("", "otlp"):
        _log.warning("OTEL_TRACES_EXPORTER is %r; otlp is the one there is, and no traces are sent", exporter)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("no traces are sent: pip install 'llamacli[telemetry]' (%s)", error)
        return None
    resource = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "llamacli"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)

"""Traces: spans of requests, variables of the environment, collectors that hang."""

import socket
import threading
from typing import Any

import pytest

from http_server import served
from llamacli.serve.http import tracing
from llamacli.serve.http.access_log import AccessLine
from llamacli.serve.http.tracing import Traces, traces_of_environment

BODY = {"messages": [{"role": "user", "content": "hi"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded() -> tuple[Traces, Any]:
    """Traces into memory, and what they are."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = memory.InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider), exporter


def test_spans_of_a_request(recorded: tuple[Traces, Any], fake, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, exporter = recorded
    monkeypatch.setattr("llamacli.serve.http.app.traces_of_environment", lambda: traces)
    with served(fake, api_keys=("secret",)) as server:
        headers = {"Authorization": "Bearer secret", "traceparent": PARENT}
        assert server.send("/v1/chat/completions", BODY, headers).status == 200
        assert server.send("/v1/chat/completions", b"{", headers).status == 400
        spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = next(span for span in exporter.get_finished_spans() if span.attributes.get("gen_ai.request.model"))
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["http.response.status_code"] == 200
    assert {"queue", "prompt", "reply"} <= set(spans)
    times = [(spans[name].start_time, spans[name].end_time) for name in ("queue", "prompt", "reply")]
    assert whole.start_time == times[0][0] <= times[0][1] == times[1][0] <= times[1][1] == times[2][0] <= times[2][1]
    assert times[2][1] == whole.end_time
    assert all(spans[name].parent.span_id == whole.context.span_id for name in ("queue", "prompt", "reply"))
    assert "secret" not in str([span.attributes for span in exporter.get_finished_spans()])


def test_failure_is_marked(recorded: tuple[Traces, Any]) -> None:
    traces, exporter = recorded
    access = AccessLine("POST", "/v1/completions", "id")
    access.status = 500
    traces.record(access, {})
    (span,) = exporter.get_finished_spans()
    assert (span.status.is_ok, span.parent) == (False, None)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
    ],
)
def test_no_traces(variables: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert traces_of_environment(variables) is None
    assert ("zipkin" in variables.values()) == ("zipkin" in caplog.text)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    assert traces_of_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None
    assert "pip install 'llamacli[telemetry]'" in caplog.text


@pytest.mark.medium
def test_collector_that_hangs_stalls_nothing(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as collector:  # it takes connections, and says nothing
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        with served(fake) as server:
            assert [server.send("/v1/chat/completions", BODY).status for _ in range(40)] == [200] * 40
    for thread in threading.enumerate():
        if thread.name == "llamacli-traces":  # it would draw random numbers, for its next try, during other tests
            thread.join(60)
            assert not thread.is_alive()

"""Server-sent events and lines of JSON, as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of a stream of events; the last one switches off the buffers of nginx."""

NDJSON_HEADERS = {"content-type": "application/x-ndjson", "cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of a stream of JSON lines."""

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8."""
    return _encoder.encode(value)


def event(value: Any, name: str | None = None) -> bytes:
    """Format one event with JSON data; `name` is its type."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encoder.encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """Format one event with JSON data that has its type."""
    return event(value, value["type"])


def line(value: Any) -> bytes:
    """Format one line of JSON."""
    return _encoder.encode(value) + b"\n"

"""Requests whose streams outlive their clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.call import Call, DisconnectedError

NAME_HEADER = "x-conversation-id"
MAX_NAME = 1000


@contextlib.contextmanager
def resumable(call: Call, request: Any) -> Iterator[None]:
    """Keep the stream of a request that has a name."""
    name = call.headers.get(NAME_HEADER)
    if not name or not getattr(request, "stream", False):
        yield
        return
    expect_name(name, NAME_HEADER)
    recordings = call.server.recordings
    recording = call.record(lambda send: recordings.begin(call.owner, name, send))
    try:
        yield
    except DisconnectedError:
        if not recording.stopped or call.started:
            raise
        text = "the request was cancelled: its stream was stopped, or replaced by another of its name"
        raise BadRequestError(text, NAME_HEADER, "cancelled") from None
    finally:
        recordings.end(call.owner, name, recording)


def expect_name(name: str, field: str) -> str:
    """Check the name of a stream. Raises BadRequestError."""
    if not 0 < len(name) <= MAX_NAME:
        raise BadRequestError(f"{field}: it must have 1 to {MAX_NAME} characters", field)
    return name

"""Streams that clients come back to, as llama-server's `/v1/stream`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta

from llamacli.serve.errors import BadRequestError, LoadingError, UnknownObjectError
from llamacli.serve.http.call import Call, DisconnectedError
from llamacli.serve.http.schemas.foreign import Schema

NAME_HEADER = "x-conversation-id"
MAX_NAME = 1000


class StreamLookup(Schema, kw_only=True):
    """Request of `/v1/streams/lookup`: names of streams."""

    conversation_ids: Annotated[list[str], Meta(max_length=1000)]


@contextlib.contextmanager
def resumable(call: Call, request: Any) -> Iterator[None]:
    """Keep the stream of a request that has a name."""
    name = call.headers.get(NAME_HEADER)
    if not name or not getattr(request, "stream", False):
        yield
        return
    _expect_name(name, NAME_HEADER)
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


async def replay(call: Call) -> None:
    """Stream of the name `conv_id` from its byte `from` on."""
    name, given = _name(call), call.query.get("from", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise BadRequestError(f"from: {given[:40]!a} is not an offset in bytes", "from")
    recording, offset = call.server.recordings.get(call.owner, name), int(given)
    if recording is None:
        raise UnknownObjectError(f"there is no stream {name!a}, or it has been removed")
    if recording.headers is None:
        raise LoadingError(f"the stream {name!a} has not begun: its request waits", retry_after=1)
    if not recording.has(offset):
        raise BadRequestError(f"from: the byte {offset} is no longer kept", "from", "offset_lost")
    async with call.stream(recording.headers) as write:
        while data := await call.unless_gone(recording.read(offset)):
            await write(data)
            offset += len(data)
        if not (recording.complete and recording.has(offset)):
            raise DisconnectedError


async def stop(call: Call) -> None:
    """Stop the stream of the name `conv_id`, and remove it."""
    call.server.recordings.stop(call.owner, _name(call))
    await call.respond_bytes(b"", "", 204)


async def lookup(call: Call, request: StreamLookup) -> None:
    """States of streams of these names, and of those with `::MODEL` behind."""
    found: dict[str, Any] = {}
    for name in request.conversation_ids:
        found |= call.server.recordings.named(call.owner, name)
    await call.respond(
        [
            {"conversation_id": name, "is_done": bool(one.completed), "total_bytes": one.n_bytes,
             "started_at": one.started, "completed_at": one.completed}
            for name, one in found.items()
        ]
    )  # fmt: skip


def _name(call: Call) -> str:
    return _expect_name(call.query.get("conv_id", ""), "conv_id")


def _expect_name(name: str, field: str) -> str:
    if not 0 < len(name) <= MAX_NAME:
        raise BadRequestError(f"{field}: it must have 1 to {MAX_NAME} characters", field)
    return name

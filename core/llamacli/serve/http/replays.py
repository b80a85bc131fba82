"""Streams that clients come back to, as llama-server's `/v1/stream`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from llamacli.serve.errors import BadRequestError, LoadingError, UnknownObjectError
from llamacli.serve.http.call import Call, DisconnectedError
from llamacli.serve.http.resumable import expect_name
from llamacli.serve.http.schemas.foreign import Schema


class StreamLookup(Schema, kw_only=True):
    """Request of `/v1/streams/lookup`: names of streams."""

    conversation_ids: Annotated[list[str], Meta(max_length=1000)]


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
    return expect_name(call.query.get("conv_id", ""), "conv_id")

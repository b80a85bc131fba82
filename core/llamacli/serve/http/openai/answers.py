"""Answers of chat and text completions: one JSON object or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.sse import DONE, event
from llamacli.serve.requests import Event


class Shapes(Protocol):
    """JSON of one request's answer."""

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The response without a stream."""

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that begin a stream."""

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks of an event."""


async def answer(call: Call, events: AsyncIterator[Event], shapes: Shapes, *, stream: bool) -> None:
    """Write a generation as the response, whole or as a stream."""
    if not stream:
        await call.respond(await shapes.whole(events))
        return
    async with call.stream(error_event=lambda error: event(openai_body(error))) as write:
        for chunk in shapes.first_chunks():
            await write(event(chunk))
        async for one in events:
            data = b"".join(map(event, shapes.chunks(one)))
            if data:
                await write(data)
        await write(DONE)

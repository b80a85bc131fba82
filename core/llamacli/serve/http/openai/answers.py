"""Answers of chat and text completions: one JSON object or server-sent events."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from llamacli.chat import openai
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.generation import Prepared
from llamacli.serve.http.replies import (
    Choice,
    Reply,
    joined,
    llamacpp_progress,
    llamacpp_timings,
    openai_usage,
    progress_timings,
)
from llamacli.serve.http.schemas.common import Generation
from llamacli.serve.http.sse import DONE, event
from llamacli.serve.requests import Done, Event, Finished, PromptProgress, TokenTimings


class Shapes(abc.ABC):
    """JSON of one request's answer: whole, and as chunks of a stream.

    `kinds` are the prefix of the id, and `object` of the whole and of a chunk. `key` is the field of a chunk's choice
    with a part of the reply, `end` its value in the last chunk.
    """

    key: str
    end: Any

    def __init__(self, request: Generation, made: Prepared, kinds: tuple[str, str, str]):
        prefix, whole, chunk = kinds
        generation, info = made.generation, made.info
        self._generation, self._n_top, self._timed_out = generation, made.n_top, False
        self._has_usage = bool(request.stream_options is not None and request.stream_options.include_usage)
        self._has_timings = bool(request.timings_per_token)
        self._times: dict[str, Any] = {}
        self._verbose = {} if made.verbose is None else {"__verbose": made.verbose}
        begin = {"id": f"{prefix}-{generation.id}", **({"object": whole} if whole == chunk else {})}
        rest = {"created": int(time.time()), "model": info.name, "system_fingerprint": info.fingerprint}
        self._head = {**begin, **rest, "object": whole}
        self._chunk_head = {**begin, **rest, "object": chunk}

    @property
    def _n_choices(self) -> int:
        return self._generation.n * len(self._generation.prompts)

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The response without a stream."""
        reply = await joined(events, self._generation, self._n_choices)
        timed_out = any(choice.timed_out for choice in reply.choices)
        return {
            **self._head,
            "choices": [self._choice(i, choice, reply) for i, choice in enumerate(reply.choices)],
            "usage": openai_usage(reply.usage),
            "timings": llamacpp_timings(reply.usage, reply.timings, timed_out=timed_out),
            **self._verbose,
        }

    @abc.abstractmethod
    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that begin a stream."""

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks of an event."""
        match event:
            case PromptProgress():
                if self._has_timings:
                    self._times = {"timings": progress_timings(event)}
                yield self._object(choices=[], prompt_progress=llamacpp_progress(event))
            case TokenTimings():
                self._times = {"timings": llamacpp_timings(event.usage, event.timings)}
            case Finished():
                self._timed_out |= event.timed_out
                yield from self._unscored(event.index)
                yield self._chunk(event.index, self.end, finish=event.reason) | self._verbose
            case Done() if self._has_usage or self._has_timings:
                last = self._object(choices=[], usage=openai_usage(event.usage))
                last["timings"] = llamacpp_timings(event.usage, event.timings, timed_out=self._timed_out)
                yield last
            case _:
                yield from self._parts(event)

    @abc.abstractmethod
    def _choice(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        """Choice of the whole response."""

    @abc.abstractmethod
    def _parts(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks of an event that has a part of the reply."""

    @abc.abstractmethod
    def _unscored(self, index: int) -> Iterator[dict[str, Any]]:
        """Echoed text, if the time was over within the prompt."""

    def _chunk(self, index: int, value: Any, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        return self._object(choices=[openai.choice(index, self.key, value, logprobs, finish)])

    def _object(self, **fields: Any) -> dict[str, Any]:
        usage = {"usage": None} if self._has_usage else {}
        return {**self._chunk_head, **usage, **self._times, **fields}


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

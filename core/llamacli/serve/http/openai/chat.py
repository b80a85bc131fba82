"""Endpoint `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from llamacli.chat import openai
from llamacli.chat.logprobs import chat_logprobs, last_tokens
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import echoed_text
from llamacli.serve.http.generation import Prepared, prepared
from llamacli.serve.http.openai.answers import Shapes, answer
from llamacli.serve.http.replies import Choice, Reply, call_id
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.requests import ArgumentsDelta, Event, PromptLogprobs, TextDelta, TokenLogprob, ToolCallDelta


async def chat_completions(call: Call, request: ChatRequest) -> None:
    """Reply to a conversation, whole or as a stream."""
    made = await prepared(call, request)
    async with call.run(made.generation) as events:
        with _controlled(call, request):
            await answer(call, events, ChatShapes(request, made), stream=bool(request.stream))


@contextlib.contextmanager
def _controlled(call: Call, request: ChatRequest) -> Iterator[None]:
    """Registration of a running reply that takes commands, by its id."""
    name, stream, known = (call.owner, call.request_id), call.stream_of_events, call.server.controlled
    if not request.reasoning_control or stream is None:
        yield
        return
    known[name] = stream
    try:
        yield
    finally:
        if known.get(name) is stream:
            del known[name]


class ChatShapes(Shapes):
    """Responses of one chat request: whole, and as chunks of a stream."""

    key, end = "delta", {}

    def __init__(self, request: ChatRequest, made: Prepared):
        super().__init__(request, made, ("chatcmpl", "chat.completion", "chat.completion.chunk"))
        self._begun, self._has_begun = echoed_text(request), False
        self._shows_reasoning = request.include_reasoning is not False
        self._n_sent: dict[tuple[int, int], int] = {}  # characters of arguments by choice and number of call

    def _choice(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        text = self._begun + "".join(choice.text)
        tokens = [*last_tokens(reply.prompt_logprobs.get(0, ()), self._begun.encode()), *choice.tokens]
        reasoning = "".join(choice.reasoning) if self._shows_reasoning else ""
        message = openai.message(text, reasoning, choice.calls, refusal=None)
        return openai.choice(index, "message", message, self._logprobs(tokens), choice.finish)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that begin the choices."""
        for i in range(self._generation.n):
            begun = "" if self._awaits_logprobs else self._begun
            yield self._chunk(i, {"role": "assistant", "content": begun or None})

    def _parts(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case PromptLogprobs():
                self._has_begun = True
                logprobs = chat_logprobs(last_tokens(event.tokens, self._begun.encode()), self._n_top or 0)
                for i in range(self._generation.n):
                    yield self._chunk(i, {"content": self._begun}, logprobs)
            case TextDelta(reasoning=True):
                if self._shows_reasoning:
                    yield self._chunk(event.index, {"reasoning_content": event.text})
            case TextDelta():
                yield self._chunk(event.index, {"content": event.text}, self._logprobs(event.tokens))
            case ArgumentsDelta():
                yield from self._call(event, event.name, event.text)
            case ToolCallDelta():
                n_sent = self._n_sent.get((event.index, event.number), 0)
                yield from self._call(event, event.call.name, event.call.text[n_sent:])

    def _call(self, event: ArgumentsDelta | ToolCallDelta, name: str, text: str) -> Iterator[dict[str, Any]]:
        key, identifier = (event.index, event.number), call_id(self._generation, event)
        for delta in openai.call_deltas(identifier, event.number, name, text, begins=key not in self._n_sent):
            yield self._chunk(event.index, delta)
        self._n_sent[key] = self._n_sent.get(key, 0) + len(text)

    def _unscored(self, index: int) -> Iterator[dict[str, Any]]:
        if self._awaits_logprobs and not self._has_begun:
            yield self._chunk(index, {"content": self._begun})

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._n_top is None else chat_logprobs(tokens, self._n_top)

    @property
    def _awaits_logprobs(self) -> bool:
        """True if the echoed text comes with its log-probabilities."""
        return self._generation.prompt_logprobs is not None

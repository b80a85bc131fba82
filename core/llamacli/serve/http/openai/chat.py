"""Endpoint `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from llamacli.chat.logprobs import chat_logprobs, last_tokens
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import chat_prompt, check_supported, echoed_text
from llamacli.serve.http.generation import generation_request
from llamacli.serve.http.openai.answers import answer
from llamacli.serve.http.replies import (
    Choice,
    call_id,
    joined,
    llamacpp_progress,
    llamacpp_timings,
    openai_usage,
)
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.requests import (
    Done,
    Event,
    Finished,
    GenerationRequest,
    ModelInfo,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    ToolCallDelta,
)


async def chat_completions(call: Call) -> None:
    """Reply to a conversation, whole or as a stream."""
    body = await call.raw_body()
    check_supported(body)
    request = convert(body, ChatRequest)
    n_top = _n_top(request)
    generation, info = await prepared(call, request, 0 if n_top is None else max(1, n_top), n_top)
    async with call.run(generation) as events:
        shapes = ChatShapes(request, generation, info, n_top, echoed_text(request))
        await answer(call, events, shapes, stream=bool(request.stream))


async def prepared(
    call: Call, request: ChatRequest, n_probs: int = 0, n_top: int | None = None
) -> tuple[GenerationRequest, ModelInfo]:
    """Request of the engine for a chat request, and its model.

    `n_top` is the number of most probable tokens to report of a text that is echoed.
    """
    info, model = await call.model(request.model)
    prompt = await call.compute(chat_prompt, request, model, info, call.settings.template)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    generation = await generation_request(
        call,
        request,
        info,
        model,
        [prompt.ids],
        constraint=prompt.constraint,
        n_probs=n_probs,
        max_tokens=max_tokens,
        reply=prompt.reply,
        prompt_logprobs=n_top if echoed_text(request) else None,
    )
    return generation, info


def _n_top(request: ChatRequest) -> int | None:
    """Number of most probable tokens to report, None for no log-probabilities."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise BadRequestError("top_logprobs: it needs logprobs", "top_logprobs")
    return None


class ChatShapes:
    """Responses of one chat request: whole, and as chunks of a stream.

    `begun` is the text of the last message that the reply repeats.
    """

    def __init__(
        self, request: ChatRequest, generation: GenerationRequest, info: ModelInfo, n_top: int | None, begun: str = ""
    ):
        self._generation, self._n_top, self._begun = generation, n_top, begun
        self._has_usage = bool(request.stream_options is not None and request.stream_options.include_usage)
        self._has_timings = bool(request.timings_per_token)
        self._timed_out = self._has_begun = False
        self._head = {
            "id": f"chatcmpl-{generation.id}",
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
        }

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The response without a stream."""
        reply = await joined(events, self._generation, self._generation.n)
        for choice in reply.choices:
            choice.text.insert(0, self._begun)
            choice.tokens[:0] = last_tokens(reply.prompt_logprobs.get(0, ()), self._begun.encode())
        choices = [
            {
                "index": i,
                "message": message(choice),
                "logprobs": None if self._n_top is None else chat_logprobs(choice.tokens, self._n_top),
                "finish_reason": choice.finish,
            }
            for i, choice in enumerate(reply.choices)
        ]
        timed_out = any(choice.timed_out for choice in reply.choices)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": openai_usage(reply.usage),
            "timings": llamacpp_timings(reply.usage, reply.timings, timed_out=timed_out),
        }

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that begin the choices."""
        for i in range(self._generation.n):
            yield self._chunk(i, {"role": "assistant", "content": "" if self._awaits_logprobs else self._begun})

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks of an event."""
        match event:
            case PromptLogprobs():
                self._has_begun = True
                logprobs = chat_logprobs(last_tokens(event.tokens, self._begun.encode()), self._n_top or 0)
                for i in range(self._generation.n):
                    yield self._chunk(i, {"content": self._begun}, logprobs)
            case TextDelta(reasoning=True):
                yield self._chunk(event.index, {"reasoning_content": event.text})
            case TextDelta():
                scores = chat_logprobs(event.tokens, self._n_top) if self._n_top is not None else None
                yield self._chunk(event.index, {"content": event.text}, scores)
            case ToolCallDelta():
                begin = {
                    "index": event.number,
                    "id": call_id(self._generation, event),
                    "type": "function",
                    "function": {"name": event.call.name, "arguments": ""},
                }
                yield self._chunk(event.index, {"tool_calls": [begin]})
                rest = {"index": event.number, "function": {"arguments": arguments_text(event.call.arguments)}}
                yield self._chunk(event.index, {"tool_calls": [rest]})
            case PromptProgress():
                yield self._object(choices=[], prompt_progress=llamacpp_progress(event))
            case Finished():
                self._timed_out |= event.timed_out
                if self._awaits_logprobs and not self._has_begun:  # the time was over within the prompt
                    yield self._chunk(event.index, {"content": self._begun})
                yield self._chunk(event.index, {}, finish_reason=event.reason)
            case Done() if self._has_usage or self._has_timings:
                last = self._object(choices=[], usage=openai_usage(event.usage))
                last["timings"] = llamacpp_timings(event.usage, event.timings, timed_out=self._timed_out)
                yield last

    @property
    def _awaits_logprobs(self) -> bool:
        """True if the echoed text comes with its log-probabilities."""
        return self._generation.prompt_logprobs is not None

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._object(choices=[choice])

    def _object(self, **fields: Any) -> dict[str, Any]:
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head, "object": "chat.completion.chunk", **usage, **fields}


def message(choice: Choice) -> dict[str, Any]:
    """Message of a choice in the shape of OpenAI's API."""
    text = "".join(choice.text)
    result: dict[str, Any] = {
        "role": "assistant",
        "content": None if choice.calls and not text else text,
        "refusal": None,
    }
    if choice.reasoning:
        result["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        result["tool_calls"] = [
            {
                "id": identifier,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_text(call.arguments)},
            }
            for identifier, call in choice.calls
        ]
    return result


def arguments_text(arguments: dict[str, Any]) -> str:
    """Arguments of a tool call as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)

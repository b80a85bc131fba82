"""Endpoint `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamacli.chat import openai
from llamacli.chat.logprobs import chat_logprobs, last_tokens
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import chat_prompt, check_supported, echoed_text
from llamacli.serve.http.generation import generation_request
from llamacli.serve.http.openai.answers import Shapes, answer
from llamacli.serve.http.replies import Choice, Reply, call_id
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.requests import (
    ArgumentsDelta,
    Event,
    GenerationRequest,
    ModelInfo,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
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


class ChatShapes(Shapes):
    """Responses of one chat request: whole, and as chunks of a stream.

    `begun` is the text of the last message that the reply repeats.
    """

    key, end = "delta", {}

    def __init__(
        self, request: ChatRequest, generation: GenerationRequest, info: ModelInfo, n_top: int | None, begun: str = ""
    ):
        super().__init__(request, generation, info, ("chatcmpl", "chat.completion", "chat.completion.chunk"))
        self._n_top, self._begun, self._has_begun = n_top, begun, False
        self._n_sent: dict[tuple[int, int], int] = {}  # characters of arguments by choice and number of call

    def _choice(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        text = self._begun + "".join(choice.text)
        tokens = [*last_tokens(reply.prompt_logprobs.get(0, ()), self._begun.encode()), *choice.tokens]
        message = openai.message(text, "".join(choice.reasoning), choice.calls, refusal=None)
        return openai.choice(index, "message", message, self._logprobs(tokens), choice.finish)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that begin the choices."""
        for i in range(self._generation.n):
            yield self._chunk(i, {"role": "assistant", "content": "" if self._awaits_logprobs else self._begun})

    def _parts(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case PromptLogprobs():
                self._has_begun = True
                logprobs = chat_logprobs(last_tokens(event.tokens, self._begun.encode()), self._n_top or 0)
                for i in range(self._generation.n):
                    yield self._chunk(i, {"content": self._begun}, logprobs)
            case TextDelta(reasoning=True):
                yield self._chunk(event.index, {"reasoning_content": event.text})
            case TextDelta():
                yield self._chunk(event.index, {"content": event.text}, self._logprobs(event.tokens))
            case ArgumentsDelta():
                yield from self._call(event, event.name, event.text)
            case ToolCallDelta():
                n_sent = self._n_sent.get((event.index, event.number), 0)
                yield from self._call(event, event.call.name, event.call.text[n_sent:])

    def _call(self, event: ArgumentsDelta | ToolCallDelta, name: str, text: str) -> Iterator[dict[str, Any]]:
        """Chunks of the next text of a call's arguments."""
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

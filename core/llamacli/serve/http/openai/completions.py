"""Endpoint `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamacli.chat import openai
from llamacli.chat.logprobs import CompletionLogprobs
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.call import Call
from llamacli.serve.http.generation import Prepared, prepared
from llamacli.serve.http.openai.answers import Shapes, answer
from llamacli.serve.http.replies import Choice, Reply
from llamacli.serve.http.schemas.completions import CompletionRequest
from llamacli.serve.requests import Event, PromptLogprobs, TextDelta, TokenLogprob


async def completions(call: Call, request: CompletionRequest) -> None:
    """Continue texts, whole or as a stream."""
    _check(request)
    made = await prepared(call, request)
    async with call.run(made.generation) as events:
        await answer(call, events, CompletionShapes(request, made), stream=bool(request.stream))


def _check(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequestError("best_of: it must equal n", "best_of", "unsupported_parameter")
    if request.suffix is not None and request.echo:
        raise BadRequestError("suffix and echo exclude each other", "suffix")


class CompletionShapes(Shapes):
    """Responses of one completion request: whole, and as chunks of a stream."""

    key, end = "text", ""

    def __init__(self, request: CompletionRequest, made: Prepared):
        super().__init__(request, made, ("cmpl", "text_completion", "text_completion"))
        self._prompts, self._echo, self._ids = made.prompts, bool(request.echo), bool(request.return_token_ids)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._scored: set[int] = set()

    def _choice(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        tokens = [*reply.prompt_logprobs.get(index // self._generation.n, ()), *choice.tokens]
        text = self._prompt(index) + "".join(choice.text)
        whole = openai.choice(index, "text", text, self._shape(index, tokens), choice.finish)
        if self._ids:
            prompt = self._generation.prompts[index // self._generation.n]
            ids = prompt if min(prompt) >= 0 else None  # there are none of embeddings
            whole |= {"token_ids": [token.id for token in choice.tokens], "prompt_token_ids": ids}
        return whole

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks with the prompts, with `echo`; their log-probabilities follow."""
        if self._echo and self._n_top is None:
            for i in range(self._n_choices):
                yield self._chunk(i, self._prompt(i))

    def _parts(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case PromptLogprobs():
                self._scored.add(event.prompt)
                for k in range(self._generation.n):
                    i = event.prompt * self._generation.n + k
                    yield self._chunk(i, self._prompt(i), self._shape(i, event.tokens))
            case TextDelta():
                chunk = self._chunk(event.index, event.text, self._shape(event.index, event.tokens))
                if self._ids:
                    chunk["choices"][0]["token_ids"] = [token.id for token in event.tokens]
                yield chunk

    def _unscored(self, index: int) -> Iterator[dict[str, Any]]:
        if self._echo and self._n_top is not None and index // self._generation.n not in self._scored:
            yield self._chunk(index, self._prompt(index), self._shape(index, ()))

    def _prompt(self, index: int) -> str:
        return self._prompts[index // self._generation.n] if self._echo else ""

    def _shape(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._n_top is None:
            return None
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(self._n_top)
        return self._logprobs[index].add(tokens)

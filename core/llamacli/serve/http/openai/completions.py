"""Endpoint `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamacli.chat import openai
from llamacli.chat.constraints import Constraint, completion_constraint
from llamacli.chat.logprobs import CompletionLogprobs
from llamacli.errors import TokenizerError
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.call import Call
from llamacli.serve.http.constraints import schema_of
from llamacli.serve.http.generation import generation_request
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.openai.answers import Shapes, answer
from llamacli.serve.http.replies import Choice, Reply
from llamacli.serve.http.schemas.completions import MAX_PROMPTS, CompletionRequest, Prompt
from llamacli.serve.requests import Event, GenerationRequest, ModelInfo, PromptLogprobs, TextDelta, TokenLogprob

DEFAULT_MAX_TOKENS = 16


async def completions(call: Call) -> None:
    """Continue texts, whole or as a stream."""
    request = await call.body(CompletionRequest)
    _check(request)
    info, model = await call.model(request.model)
    prompts, constraint = await call.compute(_prepared, request, model, info)
    n_top = request.logprobs
    generation = await generation_request(
        call,
        request,
        info,
        model,
        [ids for _, ids in prompts],
        constraint=constraint,
        n_probs=0 if n_top is None else max(1, n_top),
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        prompt_logprobs=n_top if request.echo else None,
    )
    async with call.run(generation) as events:
        shapes = CompletionShapes(request, generation, info, [text for text, _ in prompts])
        await answer(call, events, shapes, stream=bool(request.stream))


def _prepared(
    request: CompletionRequest, model: Model, info: ModelInfo
) -> tuple[list[tuple[str, list[int]]], Constraint]:
    """Prompts and constraint of a request.

    Work for the pool, as texts and schemas may be long. Raises what `encoded_prompts` and `schema_of` raise.
    """
    constraint = completion_constraint(*schema_of(request.response_format, request.json_schema, request.grammar))
    return encoded_prompts(request, model, info), constraint


def encoded_prompts(request: CompletionRequest, model: Model, info: ModelInfo) -> list[tuple[str, list[int]]]:
    """Text and token ids of each prompt.

    Prompts of ids have a text only with `echo`. Raises BadRequestError, PromptTooLongError.
    """
    prompts = as_prompts(request.prompt, "prompt", MAX_PROMPTS)
    for prompt in prompts:
        expect_room([prompt, request.suffix or ""], model, info)
    if request.suffix is not None:
        return [_infilled(prompt, request.suffix, model) for prompt in prompts]
    return [_encoded(prompt, request, model) for prompt in prompts]


def as_prompts(prompt: Prompt, name: str, limit: int) -> list[str | list[int]]:
    """Prompts, or other inputs, one by one. Raises BadRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[str | list[int]] = []
    if prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        for i, item in enumerate(prompt):
            if isinstance(item, int):
                raise BadRequestError(f"{name}[{i}]: token ids and texts cannot be mixed in one list", name)
            prompts.append(item)
    if not 1 <= len(prompts) <= limit:
        raise BadRequestError(f"{name}: it has {len(prompts)} elements; 1 to {limit} are allowed", name)
    return prompts


def checked_ids(ids: list[int], model: Model, name: str) -> list[int]:
    """Token ids that are in the vocabulary, at least one. Raises BadRequestError."""
    n_vocab = model.tokenizer.n_vocab
    if not ids:
        raise BadRequestError(f"{name}: it is empty", name)
    if max(ids) >= n_vocab:
        raise BadRequestError(f"{name}: token {max(ids)} is not an id from 0 to {n_vocab - 1}", name)
    return ids


def _encoded(prompt: str | list[int], request: CompletionRequest, model: Model) -> tuple[str, list[int]]:
    if isinstance(prompt, str):
        try:
            ids = model.tokenizer.encode_prompt(prompt, parse_special=bool(request.parse_special))
        except TokenizerError as error:
            raise BadRequestError(f"prompt: {error}", "prompt") from None
        return prompt, checked_ids(ids, model, "prompt")
    ids = checked_ids(prompt, model, "prompt")
    return model.tokenizer.decode(ids) if request.echo else "", ids


def _infilled(prompt: str | list[int], suffix: str, model: Model) -> tuple[str, list[int]]:
    """Prompt for infilling (FIM, prefix before suffix)."""
    before = prompt if isinstance(prompt, str) else checked_ids(prompt, model, "prompt")
    try:
        ids = model.tokenizer.encode_infill(before, suffix)
    except TokenizerError as error:
        raise BadRequestError(f"suffix: {error}", "suffix", "not_supported") from None
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt), ids


def _check(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequestError("best_of: it must equal n", "best_of", "unsupported_parameter")
    if request.max_tokens == 0 and not request.echo:
        raise BadRequestError("max_tokens: 0 is for echo only", "max_tokens")
    if request.suffix is not None and request.echo:
        raise BadRequestError("suffix and echo exclude each other", "suffix")


class CompletionShapes(Shapes):
    """Responses of one completion request: whole, and as chunks of a stream."""

    key, end = "text", ""

    def __init__(
        self, request: CompletionRequest, generation: GenerationRequest, info: ModelInfo, prompts: Sequence[str]
    ):
        super().__init__(request, generation, info, ("cmpl", "text_completion", "text_completion"))
        self._prompts, self._echo, self._n_top = prompts, bool(request.echo), request.logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._scored: set[int] = set()

    def _choice(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        tokens = [*reply.prompt_logprobs.get(index // self._generation.n, ()), *choice.tokens]
        text = self._prompt(index) + "".join(choice.text)
        return openai.choice(index, "text", text, self._shape(index, tokens), choice.finish)

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
                yield self._chunk(event.index, event.text, self._shape(event.index, event.tokens))

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

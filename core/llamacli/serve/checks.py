"""Checks of requests before they enter the queue."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llamacli.engine.adapters import checked_scale
from llamacli.engine.batching import check_inputs
from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import InvalidRequestError
from llamacli.inputs import Contents
from llamacli.kv import N_BATCH
from llamacli.serve.errors import NotSupportedError, PromptTooLongError
from llamacli.serve.requests import GenerationRequest, Ids, Request
from llamacli.util.numbers import is_integer

MAX_CHOICES = 16
MAX_PROMPTS, MAX_INPUTS = 64, 2048


def check_request(request: Request, model: CompiledModel, *, n_ctx: int, max_running: int, embeds: bool) -> None:
    """Check that a model can serve a request.

    `n_ctx` are the tokens of a context, `max_running` the sequences at once; `embeds` is true if the model has
    embeddings. Raises InvalidRequestError, PromptTooLongError, NotSupportedError.
    """
    n_vocab, is_encoder = model.config.n_vocab, model.program.needs_whole_input
    generation = request if isinstance(request, GenerationRequest) else None
    max_tokens, n = (generation.max_tokens, generation.n) if generation else (0, 1)
    most = MAX_PROMPTS if generation else MAX_INPUTS
    _expect(0 < len(request.prompts) <= most, f"{len(request.prompts)} prompts", f"1 to {most}")
    most = min(MAX_CHOICES, max_running)
    _expect(is_integer(n) and 1 <= n <= most, f"n = {n!r}", f"1 to {most}")
    _expect(max_tokens is None or (is_integer(max_tokens) and max_tokens >= 0), "max_tokens", "at least 0")
    for prompt in request.prompts:
        _expect(len(prompt) > 0, "an empty prompt", "at least one token")
        if len(prompt) + (max_tokens != 0) > n_ctx:
            raise PromptTooLongError(len(prompt), n_ctx)
        if is_encoder and len(prompt) > N_BATCH:
            raise PromptTooLongError(len(prompt), N_BATCH)
        if request.contents is not None:
            _check_contents(prompt, request, model)
        elif set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < n_vocab:
            continue  # the usual case, fast: the event loop waits for this
        else:
            wrong = next((token for token in prompt if not is_integer(token) or not 0 <= token < n_vocab), None)
            _expect(wrong is None, f"token {wrong!r}", f"ids from 0 to {n_vocab - 1}")
    if generation is None and not embeds:
        raise NotSupportedError(f"the model {request.model!r} has no embeddings")
    if generation is not None and is_encoder:
        raise NotSupportedError(f"the model {request.model!r} generates no text: it has embeddings only")
    if generation is None and model.program.has_encoder:
        raise NotSupportedError(f"the model {request.model!r} generates text: its encoder is a model of its own")


def _check_contents(prompt: Ids, request: Request, model: CompiledModel) -> None:
    """Check a prompt with content keys.

    Log-probabilities are of tokens, which embeddings are not.
    """
    contents = request.contents
    assert contents is not None
    wrong = next((key for key in prompt if key < 0 and key not in contents.cells), None)
    _expect(wrong is None, f"token {wrong!r}", "ids, and content keys of the request's contents")
    logprobs = request.prompt_logprobs if isinstance(request, GenerationRequest) else None
    _expect(logprobs is None, "prompt_logprobs of embeddings", "prompts of token ids")
    check_inputs(model.program.graph, contents.slice(prompt))


def with_encoder_inputs(request: Request, model: CompiledModel) -> Request:
    """Request whose prompts are texts for an encoder.

    It is the given one if the model has none.

    Raises InvalidRequestError for a text that is too long for it; NotSupportedError for a request with contents.
    """
    if not model.program.has_encoder or not isinstance(request, GenerationRequest):
        return request
    if request.contents is not None:
        raise NotSupportedError(f"the model {request.model!r} has an encoder, which reads text: it takes no embeddings")
    contents = Contents()
    prompts = tuple(tuple(contents.add(model.encoder_inputs(prompt))) for prompt in request.prompts)
    return attrs.evolve(request, prompts=prompts, contents=contents)


def expect_adapters(scales: Mapping[int, float], n_adapters: int) -> None:
    """Raise InvalidRequestError for an unknown LoRA adapter or a wrong scale."""
    for number, scale in scales.items():
        found = f"LoRA adapter {number!r}"
        _expect(is_integer(number) and 0 <= number < n_adapters, found, f"the model has {n_adapters} adapters")
        checked_scale(scale, f"the scale of {found}")


def _expect(holds: bool, found: str, allowed: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{found} is not allowed: {allowed}")

"""Sampling parameters, seeds and limits of requests, and requests of the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from llamacli.chat.constraints import Constraint
from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.sampling import SamplerChain, SamplingParams
from llamacli.sampling.defaults import params_with_defaults
from llamacli.sampling.grammar import prepare
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.call import Call
from llamacli.serve.http.constraints import chain
from llamacli.serve.http.schemas.common import SAMPLING_FIELDS, Generation, LoraScale, Sampling
from llamacli.serve.requests import AdapterScales, GenerationRequest, ModelInfo, ReplyFormat


async def generation_request(
    call: Call,
    request: Generation,
    info: ModelInfo,
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    constraint: Constraint,
    n_probs: int = 0,
    max_tokens: int | None,
    reply: ReplyFormat | None = None,
    prompt_logprobs: int | None = None,
) -> GenerationRequest:
    """Request of the engine for an API request and its prompts.

    Grammars are compiled in a thread. Raises BadRequestError.
    """
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options: it is for streams only", "stream_options")
    params = sampling_params(request, model, info.n_ctx or model.config.n_ctx, constraint, n_probs)
    seed = request.seed if request.seed is not None and request.seed >= 0 else secrets.randbits(63)
    call.access.fields["seed"] = seed
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return GenerationRequest(
        id=call.request_id,
        model=info.name,
        prompts=tuple(map(tuple, prompts)),
        params=params if constraint.is_free else await compiled(call, model, params),
        seed=seed,
        n=request.n or 1,
        max_tokens=max_tokens,
        stop=stops,
        ignore_eos=bool(request.ignore_eos),
        reply=reply,
        prompt_logprobs=prompt_logprobs,
        progress=bool(request.return_progress and request.stream),
        key=call.key,
        draft_max=request.draft_max,
        adapters=info.adapter_scales if request.lora is None else adapter_scales(request.lora, info, "lora"),
    )


def adapter_scales(given: Sequence[LoraScale], info: ModelInfo, name: str) -> AdapterScales:
    """Scales of LoRA adapters by id.

    Those that are not given are not applied. Raises BadRequestError that names the field for an id that the model does
    not have, or that is there twice.
    """
    scales: dict[int, float] = {}
    for i, one in enumerate(given):
        if one.id >= len(info.adapters):
            raise BadRequestError(f"{name}[{i}].id: {one.id} is none of the {len(info.adapters)} adapters", name)
        if one.id in scales:
            raise BadRequestError(f"{name}[{i}].id: {one.id} is there twice", name)
        scales[one.id] = one.scale
    return tuple(scales.items())


def sampling_params(
    request: Sampling, model: Model, n_ctx: int, constraint: Constraint, n_probs: int = 0
) -> SamplingParams:
    """Sampling parameters of a request, with the file's defaults, else llama.cpp's.

    Raises BadRequestError.
    """
    given: dict[str, Any] = {}
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(request, name)
        if value is not None:
            given[field] = value
    given["logit_bias"] = _biases(request.logit_bias or {}, model.tokenizer.n_vocab)
    given["grammar"], given["json_schema"] = constraint.grammar, constraint.json_schema
    given["grammar_triggers"], given["grammar_after"] = constraint.triggers, constraint.after
    given["reasoning_markers"], given["n_probs"] = constraint.markers, n_probs
    try:
        return params_with_defaults(given, model.metadata, n_ctx, model.find_sampler)
    except InvalidRequestError as error:
        raise BadRequestError(str(error)) from None


async def compiled(call: Call, model: Model, params: SamplingParams) -> SamplerChain:
    """Sampler chain with a compiled grammar.

    Raises BadRequestError, also if it takes too long.
    """
    await call.server.run(prepare, model.tokenizer)  # not within the time of the schema that comes first
    seconds = call.settings.schema_timeout
    try:
        async with asyncio.timeout(seconds):
            return await call.server.compilers.run(call.key, chain, model, params)
    except TimeoutError:
        raise BadRequestError(
            f"the schema or grammar took longer than {seconds:g} seconds to compile", None, "invalid_schema"
        ) from None


def _biases(biases: dict[str, float], n_vocab: int) -> dict[int, float]:
    result = {}
    for name, bias in biases.items():
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 12 else -1
        if not 0 <= token < n_vocab:
            raise BadRequestError(
                f"logit_bias: {name!r} is not a token id from 0 to {n_vocab - 1}", "logit_bias", "invalid_value"
            )
        result[token] = bias
    return result

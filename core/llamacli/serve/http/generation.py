"""Sampling parameters, seeds and limits of requests, and requests of the engine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.constraints import Constraint, completion_constraint
from llamacli.errors import InvalidRequestError
from llamacli.media.encoder import Tile
from llamacli.model import Model
from llamacli.sampling import SamplerChain, SamplingParams
from llamacli.sampling.defaults import params_with_defaults
from llamacli.sampling.grammar import prepare
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import Prompt, chat_prompt, echoed_text
from llamacli.serve.http.constraints import chain, constraints_of, schema_of
from llamacli.serve.http.errors import bad_request
from llamacli.serve.http.pictures import layouts, pictured_prompt
from llamacli.serve.http.prompt_embeds import embedded_prompts
from llamacli.serve.http.prompts import encoded_prompts, has_pictures
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import SAMPLING_FIELDS, Generation, LoraScale, Sampling
from llamacli.serve.http.schemas.completions import CompletionRequest
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import AdapterScales, GenerationRequest, ModelInfo

BUDGET, UNLIMITED = "reasoning_budget_tokens", 1 << 30
"""Tokens of a budget of reasoning that only a command ends."""
DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion without a limit, as in OpenAI's API."""


@attrs.frozen
class Prepared:
    """API request as the engine takes it.

    `prompts` are the texts of its prompts. `n_top` are the most probable tokens to report, None for no report.
    `verbose` is what a client gets besides that debugs its requests, None for nothing.
    """

    generation: GenerationRequest
    info: ModelInfo
    prompts: tuple[str, ...]
    n_top: int | None
    verbose: dict[str, Any] | None = None


async def prepared(call: Call, request: ChatRequest | CompletionRequest) -> Prepared:
    """Request of the engine for a chat or a text.

    Prompts are rendered and tokenized, and grammars compiled, in threads. Raises BadRequestError, PromptTooLongError.
    """
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options: it is for streams only", "stream_options")
    info, model = await call.model(request.model)
    settings = call.server.settings_of(info)
    n_top = _n_top(request)
    reply, contents, echoes = None, None, bool(request.echo)
    prediction: tuple[int, ...] = ()
    tiles: Mapping[int, tuple[Tile, int]] = {}
    if isinstance(request, ChatRequest):
        prompt = await rendered(call, request, info, model)
        contents, tiles, prediction = prompt.contents, prompt.tiles, prompt.prediction
        prompts, constraint, reply = [(prompt.text, list(prompt.ids))], prompt.constraint, prompt.reply
        echoes = bool(echoed_text(request))
    else:
        embedded, contents = await call.compute(embedded_prompts, request, info)
        prompts, constraint = await call.compute(_texts, request, model, info)
        prompts = [*(("", keys) for keys in embedded), *prompts]
        if has_pictures(request.prompt):
            _expect_text_only(request)
            keys, contents, tiles = await pictured_prompt(
                call, request.prompt, model, info,
                add_special=request.add_special_tokens is not False, parse_special=bool(request.parse_special),
            )  # fmt: skip
            prompts = [("", keys)]
    wants_ids = isinstance(request, CompletionRequest) and request.return_token_ids
    n_probs = max(1, n_top) if n_top is not None else int(bool(wants_ids))
    ends = tuple(request.stop_token_ids or ())
    all_ends = {*ends, *(reply.end_ids if reply is not None else ())}
    n_ctx = info.n_ctx or model.config.n_ctx
    params = sampling_params(settings, request, model, n_ctx, constraint, n_probs, all_ends)
    seed = settings.seed if request.seed is None else request.seed
    seed = secrets.randbits(63) if seed is None or seed < 0 else seed
    call.access.fields["seed"] = seed
    seconds, field = request.t_max_predict_ms, next(iter(constraints_of(request)), "tools")
    generation = GenerationRequest(
        id=call.request_id,
        model=info.name,
        prompts=tuple(tuple(ids) for _, ids in prompts),
        contents=contents or None,
        tiles=tiles,
        params=params if constraint.is_free else await compiled(call, model, params, field),
        seed=seed,
        n=request.n or request.n_cmpl or 1,
        max_tokens=_max_tokens(request, settings.max_tokens),
        stop=_stops(settings.stop if request.stop is None else request.stop),
        min_indent=getattr(request, "n_indent", None) or 0,
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        end_ids=ends,
        special_tokens=request.skip_special_tokens is False,
        max_seconds=seconds / 1000 if seconds is not None and seconds > 0 else None,
        reply=reply,
        prompt_logprobs=n_top if echoes else None,
        progress=bool(request.return_progress and request.stream),
        timed=bool(request.timings_per_token and request.stream),
        key=call.key,
        draft_max=request.draft_max,
        prediction=prediction[:n_ctx],  # no reply is longer
        slot=request.id_slot if request.id_slot is not None and request.id_slot >= 0 else None,
        adapters=info.adapter_scales if request.lora is None else adapter_scales(request.lora, info, "lora"),
    )
    verbose = None
    if settings.log_texts if request.verbose is None else request.verbose:
        texts = [spelled(model, ids) for ids in generation.prompts]
        shown = texts[0] if len(texts) == 1 else texts
        verbose = {"prompt": shown, "generation_settings": generation_settings(request, generation)}
    return Prepared(generation, info, tuple(text for text, _ in prompts), n_top, verbose)


def spelled(model: Model, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens and first space spelled."""
    pieces = (model.tokenizer.piece_bytes(token, unparse_special=True) for token in ids if token >= 0)
    return b"".join(pieces).decode("utf-8", "replace")


def generation_settings(request: Generation, generation: GenerationRequest) -> dict[str, Any]:
    """Parameters of the generation under llama-server's names."""
    params = generation.params.params if isinstance(generation.params, SamplerChain) else generation.params
    biases = [{"token": token, "bias": bias if math.isfinite(bias) else None} for token, bias in params.logit_bias]
    limit = -1 if generation.max_tokens is None else generation.max_tokens
    return attrs.asdict(params) | {
        "seed": generation.seed,
        "n_predict": limit,
        "max_tokens": limit,
        "logit_bias": biases,
        "stop": generation.stop,
        "ignore_eos": generation.ignore_eos,
        "stream": bool(request.stream),
        "n_probs": request.n_probs or 0,
        "post_sampling_probs": bool(getattr(request, "post_sampling_probs", None)),
        "timings_per_token": bool(request.timings_per_token),
        "lora": [{"id": number, "scale": scale} for number, scale in generation.adapters],
    }


async def rendered(call: Call, request: ChatRequest, info: ModelInfo, model: Model, *, fits: bool = True) -> Prompt:
    """Prompt of a chat, with its pictures; see `chat_prompt`."""
    pictures = await layouts(call, request.messages, model, info)
    return await call.compute(chat_prompt, request, model, info, call.server.settings_of(info), pictures, fits=fits)


def _expect_text_only(request: CompletionRequest) -> None:
    """Check that nothing needs a prompt of text or token ids."""
    for name in ("prompt_embeds", "suffix", "echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise BadRequestError(f"{name}: it needs a prompt of text or token ids, without pictures", name)


def _texts(request: CompletionRequest, model: Model, info: ModelInfo) -> tuple[list[tuple[str, list[int]]], Constraint]:
    """Prompts and constraint of a text.

    Work for the pool, as texts and schemas may be long.
    """
    constraint = completion_constraint(*schema_of(request))
    return encoded_prompts(request, model, info), constraint


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _n_top(request: ChatRequest | CompletionRequest) -> int | None:
    """Number of most probable tokens to report, None for no log-probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs if request.logprobs is not None else request.n_probs or None
    if request.logprobs:
        return request.top_logprobs or request.n_probs or 0
    if request.top_logprobs:
        raise BadRequestError("top_logprobs: it needs logprobs", "top_logprobs")
    return request.n_probs or None


def _max_tokens(request: ChatRequest | CompletionRequest, default: int | None) -> int | None:
    """Limit of the tokens, None for none."""
    given = [request.max_tokens, request.n_predict]
    if isinstance(request, ChatRequest):
        given.insert(0, request.max_completion_tokens)
    found = next((n for n in given if n is not None), None)
    if found is None:
        found = default
    if found is None:
        return DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else None
    if not found and not (isinstance(request, CompletionRequest) and (request.echo or request.max_tokens is None)):
        raise BadRequestError("max_tokens: 0 is for echo of /v1/completions only", "max_tokens")
    return found if found >= 0 else None


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
    settings: HttpSettings,
    request: Sampling,
    model: Model,
    n_ctx: int,
    constraint: Constraint,
    n_probs: int = 0,
    ends: Iterable[int] = (),
) -> SamplingParams:
    """Sampling parameters of a request, else the server's, the file's or llama.cpp's.

    `ends` are tokens that end the text besides the model's own. Raises BadRequestError.
    """
    given: dict[str, Any] = dict(settings.sampling)
    if getattr(request, "reasoning_control", None) and SAMPLING_FIELDS[BUDGET] not in given:
        given[SAMPLING_FIELDS[BUDGET]] = UNLIMITED
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(request, name, None)
        if value is not None:
            given[field] = value
    given["logit_bias"] = _biases(request.logit_bias or {}, model)
    given["end_token_ids"] = tuple(ends)
    given["grammar"], given["json_schema"] = constraint.grammar, constraint.json_schema
    given["grammar_triggers"], given["grammar_after"] = constraint.triggers, constraint.after
    given["reasoning_markers"], given["n_probs"] = constraint.markers, n_probs
    given["post_sampling_probs"] = bool(getattr(request, "post_sampling_probs", None))
    try:
        return params_with_defaults(given, model.metadata, n_ctx, model.find_sampler)
    except InvalidRequestError as error:
        raise bad_request(error) from None


async def compiled(call: Call, model: Model, params: SamplingParams, field: str) -> SamplerChain:
    """Sampler chain with a compiled grammar.

    Raises BadRequestError that names the field, also if it takes too long; QueueTimeoutError if those before it do.
    """
    await call.server.run(prepare, model.tokenizer)  # not within the time of the schema that comes first
    try:
        return await call.server.compilers.run(None if call.background else call.key, chain, model, params)
    except BadRequestError as error:
        error.param = error.param or field
        raise


def _biases(biases: Mapping[str, float] | Sequence[tuple[int | str, float]], model: Model) -> dict[int, float]:
    """Biases by token id.

    A text stands for its tokens, in an object unless it is a number; false forbids a token.
    """
    result, n_vocab = dict[int, float](), model.tokenizer.n_vocab
    is_object = isinstance(biases, Mapping)
    for name, bias in biases.items() if isinstance(biases, Mapping) else biases:
        if isinstance(name, int) or (is_object and name.removeprefix("-").isdecimal()):
            text = str(name)
            tokens = [int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1]
        else:
            tokens = model.tokenizer.encode_run(name, continues=True)
        if not all(0 <= token < n_vocab for token in tokens):
            raise BadRequestError(
                f"logit_bias: {name!r} is not a token id from 0 to {n_vocab - 1}", "logit_bias", "invalid_value"
            )
        result |= dict.fromkeys(tokens, -math.inf if bias is False else float(bias))
    return result

"""Endpoints of llama.cpp's and vLLM's servers: tokens, templates, properties, state."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import attrs

from llamacli.chat.constraints import FREE
from llamacli.chat.formats import own_templates
from llamacli.errors import ChatTemplateError, InvalidRequestError, TokenizerError
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, NotSupportedError
from llamacli.serve.http.call import Call
from llamacli.serve.http.chats import as_dicts, codec_of, default_variables, tools_as_dicts
from llamacli.serve.http.exposition import CONTENT_TYPE, exposition
from llamacli.serve.http.generation import adapter_scales, rendered, sampling_params
from llamacli.serve.http.limits import expect_length
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import LoraScale, Sampling
from llamacli.serve.http.schemas.local import DetokenizeRequest, TokenizeRequest
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.metrics import ModelStats
from llamacli.serve.requests import ModelInfo
from llamacli.util.sampling_params import PARAMETERS, SAMPLERS, Parameter


async def tokenize(call: Call, request: TokenizeRequest) -> None:
    """Token ids of a text or of a conversation."""
    info, model = await call.model(request.model)
    tokens = await call.compute(_tokenized, request, model, call.server.settings_of(info))
    result: dict[str, Any] = {"tokens": tokens}
    if request.content is None:
        result |= {"count": len(tokens), "max_model_len": info.n_ctx}
    await call.respond(result)


async def detokenize(call: Call, request: DetokenizeRequest) -> None:
    """Text of token ids, special tokens spelled.

    `prompt` is vLLM's name of it.
    """
    _, model = await call.model(request.model)
    try:
        text = await call.compute(model.tokenizer.decode, request.tokens, unparse_special=True)
    except InvalidRequestError as error:
        raise BadRequestError(f"tokens: {error}", "tokens") from None
    await call.respond({"content": text, "prompt": text})


async def tokenizer_info(call: Call) -> None:
    """Special tokens and chat template of a model, as vLLM's."""
    info, model = await call.model(call.wanted_model)
    tokenizer = model.tokenizer
    texts = {
        f"{name}_token": None if token is None else tokenizer.token_text(token)
        for name, token in (
            ("bos", tokenizer.bos_id),
            ("eos", tokenizer.eos_id),
            ("unk", tokenizer.unk_id),
            ("pad", tokenizer.pad_id),
        )
    }
    template = call.server.settings_of(info).template or own_templates(model.metadata).get("default")
    await call.respond({**texts, "model_max_length": info.n_ctx, "chat_template": template})


async def apply_template(call: Call, request: ChatRequest) -> None:
    """Prompt of a conversation, rendered and not evaluated."""
    info, model = await call.model(request.model)
    prompt = await rendered(call, request, info, model, fits=False)
    await call.respond({"prompt": prompt.text, "n_tokens": len(prompt.ids)})


async def props(call: Call) -> None:
    """Properties of the server and a model, as llama-server's."""
    info = call.server.find_model(call.wanted_model)
    fingerprint, found = call.server.props.get(info.name, ("", None))
    if found is None and not info.loaded and (not call.settings.autoload or info.status == "sleeping"):
        found = _named(info)
    elif found is None or (info.loaded and info.fingerprint != fingerprint):
        found = await _props(call)
        info = call.server.find_model(info.name)
        call.server.props[info.name] = info.fingerprint, found
    await call.respond({**found, **_role(call), "is_sleeping": not info.loaded})  # looking keeps no model awake


def _role(call: Call) -> dict[str, Any]:
    """Properties of llama-server's router, where there are several models."""
    if len(call.server.engine.models()) == 1:
        return {}
    return {"role": "router", "max_instances": call.settings.models_max or 0, "models_autoload": call.settings.autoload}


async def _props(call: Call) -> dict[str, Any]:
    info, model = await call.model(call.wanted_model)
    n_ctx = info.n_ctx or model.config.n_ctx
    settings = call.server.settings_of(info)
    params = attrs.asdict(sampling_params(settings, Sampling(), model, n_ctx, FREE))
    params["seed"] = -1 if settings.seed is None else settings.seed
    template = settings.template or own_templates(model.metadata).get("default", "")
    return {
        "default_generation_settings": {"n_ctx": n_ctx, "params": params},
        "sampling_parameters": [_described(one) for one in PARAMETERS.values()],
        "total_slots": call.settings.total_slots,
        "chat_template": template,
        "modalities": {"vision": info.sees, "audio": info.hears},
        "n_ctx": n_ctx,
        **_named(info),
    }


def _named(info: ModelInfo) -> dict[str, Any]:
    """Properties that need no loaded model."""
    names = {"model_alias": info.name, "model_path": PurePath(info.path).name}
    return {**names, "build_info": f"b0-llamacli-{version()}"}


def _described(one: Parameter) -> dict[str, Any]:
    (group,) = (entry.group for entry in SAMPLERS if entry.title == one.sampler)
    kind = "integer" if one.is_integer else "number"
    limits = {"minimum": one.low, "maximum": one.high}
    return {"name": one.name, "group": group, "type": kind, **limits, "description": one.help}


async def adapters(call: Call) -> None:
    """LoRA adapters of a model, with their scales."""
    await call.respond(_adapters(call.server.find_model(call.wanted_model)))


async def set_adapters(call: Call, given: list[LoraScale]) -> None:
    """Set the scales of LoRA adapters; those not listed get 0."""
    info = call.server.find_model(call.wanted_model)
    call.server.engine.set_adapters(info.name, adapter_scales(given, info, "body"))
    await call.respond({"success": True})


def _adapters(info: ModelInfo) -> list[dict[str, Any]]:
    return [{"id": one.id, "path": PurePath(one.path).name, "scale": one.scale} for one in info.adapters]


async def health(call: Call) -> None:
    """State of the server: 200 while it can serve, else 503."""
    status = call.server.engine.stats().status
    if status == "ok":
        await call.respond({"status": "ok"})
        return
    messages = {
        "loading": "Loading model",
        "stage_lost": "Loading model: a worker was lost, and another takes its place",
        "draining": "Shutting down",
        "stuck": "The engine does not advance",
    }
    error = {"message": messages[status], "type": "unavailable_error", "param": None, "code": status}
    await call.respond({"error": error}, 503, {"retry-after": "1"})


async def metrics(call: Call) -> None:
    """Metrics for Prometheus."""
    server = call.server
    if not call.settings.metrics:
        raise NotSupportedError("this server shows no metrics; start it with --metrics")
    text = exposition(server.engine.stats(), server.metrics, llamacpp=call.settings.llamacpp_metrics)
    headers = {"process-start-time-unix": str(int(server.metrics.started))}
    await call.respond_bytes(text, CONTENT_TYPE, headers=headers)


async def slots(call: Call) -> None:
    """Requests that run and idle slots, with counts and without texts.

    Off unless `--slots` is given.
    """
    if not call.settings.slots:
        raise NotSupportedError("this server does not show its slots; start it with --slots")
    wanted = call.wanted_model
    shown = None if wanted is None else call.server.find_model(wanted).name
    stats = call.server.engine.stats()
    contexts = {info.name: info.n_ctx for info in call.server.engine.models() if info.loaded}
    await call.respond(
        [
            {"model": name, "n_ctx": contexts[name], **slot, "id": i}
            for name, one in stats.models.items()
            if shown in (None, name) and name in contexts
            for i, slot in enumerate(_slots(one, call.settings.total_slots))
        ]
    )


def _slots(model: ModelStats, n: int) -> Iterator[dict[str, Any]]:
    """Running requests of a model, and idle slots up to `n`."""
    running = [{**attrs.asdict(slot), "request_id": slot.id, "is_processing": True} for slot in model.slots]
    yield from running
    yield from itertools.repeat({"is_processing": False}, max(0, n - len(running)))


def version() -> str:
    """Version of this package, "unknown" if it is not installed."""
    try:
        return importlib.metadata.version("llamacli-core")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _tokenized(request: TokenizeRequest, model: Model, settings: HttpSettings) -> list[Any]:
    ids = _ids(request, model, settings)
    if not request.with_pieces:
        return ids
    pieces = {token: _piece(model, token) for token in set(ids)}
    return [{"id": token, "piece": pieces[token]} for token in ids]


def _ids(request: TokenizeRequest, model: Model, settings: HttpSettings) -> list[int]:
    given = [text for text in (request.content, request.prompt, request.messages) if text is not None]
    if len(given) != 1:
        raise BadRequestError("give one of content, prompt and messages", "content", "missing_required_parameter")
    try:
        if request.messages is not None:
            return _conversation(request, model, settings)
        text = request.prompt if request.content is None else request.content
        assert text is not None
        expect_length(len(text), "content")
        add_special = request.add_special if request.content is not None else request.add_special_tokens is not False
        parse_special = request.parse_special is not False  # the default of both
        return model.tokenizer.encode(text, add_special=bool(add_special), parse_special=parse_special)
    except TokenizerError as error:
        raise BadRequestError(str(error), "content") from None


def _conversation(request: TokenizeRequest, model: Model, settings: HttpSettings) -> list[int]:
    messages = as_dicts(request.messages or ())
    expect_length(sum(len(message["content"]) for message in messages), "messages")  # rendering takes seconds too
    codec = codec_of(model, settings.template, bool(request.tools))
    try:
        rendering = codec.render(
            messages,
            tools=tools_as_dicts(request.tools or ()),
            variables=default_variables(settings, request.tools or ()),
            add_generation_prompt=request.add_generation_prompt is not False,
        )
    except ChatTemplateError as error:
        raise BadRequestError(str(error), "messages", "chat_template_error") from None
    expect_length(len(rendering.text), "messages")
    return codec.encode(rendering)


def _piece(model: Model, token: int) -> str | list[int]:
    piece = model.tokenizer.piece_bytes(token, unparse_special=True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

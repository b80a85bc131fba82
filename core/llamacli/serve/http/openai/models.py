"""Endpoints of models: `/v1/models`, `/models/load` and others."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from llamacli.serve.errors import UnknownModelError
from llamacli.serve.http.call import Call
from llamacli.serve.http.jobs import job_of
from llamacli.serve.http.schemas.foreign import Schema
from llamacli.serve.http.sse import event
from llamacli.serve.requests import ModelInfo

EVENT_INTERVAL_S = 0.1
"""Seconds between looks for changes."""


class ModelName(Schema, kw_only=True):
    """Request of `/models/load` and `/models/unload`."""

    model: str


async def models(call: Call) -> None:
    """All models that the server has, loaded or not.

    `?reload=1` reads their sources again.
    """
    if call.query.get("reload") == "1":
        await call.server.reload()
    infos = call.server.engine.models()
    data = [_shape(info, call) for info in infos]
    named = [{"name": info.name, "model": info.name, "capabilities": _capabilities(info)} for info in infos]
    ends = {"has_more": False, "first_id": infos[0].name, "last_id": infos[-1].name} if infos else {"has_more": False}
    page = ends if _is_anthropic(call) else {}
    await call.respond({"object": "list", "data": data, "models": named, **page})


async def model(call: Call) -> None:
    """Model of a name or alias."""
    await call.respond(_shape(_known(call, call.path_params["name"]), call))


async def events(call: Call) -> None:
    """Stream of the models' states, as llama-server's events."""
    seen: dict[str, dict[str, Any]] = {}
    others = call.server.events
    n_others = others.n
    async with call.stream() as write:
        while call.server.engine.stats().status != "draining":
            present = {info.name: _status(info) for info in call.server.engine.models()}
            for name, status in present.items():
                if seen.get(name) != status:
                    await write(
                        event({"model": name, "event": "model_status", "data": {**status, "status": status["value"]}})
                    )
            for name in seen.keys() - present.keys():
                await write(event({"model": name, "event": "model_remove"}))
            seen, new, n_others = present, others.since(n_others), others.n
            for one in new:
                await write(event(one))
            await call.unless_gone(asyncio.sleep(EVENT_INTERVAL_S))


async def load(call: Call, request: ModelName) -> None:
    """Load a model, as llama-server's router."""
    await call.model(_known(call, request.model).name, loads=True)
    await call.respond({"success": True})


async def unload(call: Call, request: ModelName) -> None:
    """Unload a model that is not in use, or end its download."""
    if call.server.jobs.get(job_of(request.model)) is not None:
        await call.server.jobs.cancel(job_of(request.model))
        await call.respond({"success": True})
        return
    call.server.engine.unload(_known(call, request.model).name)
    await call.respond({"success": True})


def _known(call: Call, name: str) -> ModelInfo:
    """Model of a name or alias, whatever `any_model` is. Raises UnknownModelError."""
    info = call.server.find_model(name)
    if name not in (info.name, *info.aliases):
        raise UnknownModelError(f"the model {name!r} does not exist")
    return info


def _status(info: ModelInfo) -> dict[str, Any]:
    """State of a model, with the error of its last load."""
    failed = {"failed": True, "error": info.failure} if info.failure and not info.loaded else {}
    return {"value": info.status, **failed}


def _capabilities(info: ModelInfo) -> list[str]:
    """Capabilities under llama-server's names."""
    return ["completion", *(["multimodal"] if info.sees or info.hears else [])]


def _is_anthropic(call: Call) -> bool:
    """True for clients of Anthropic's API, whose paths are equal."""
    return "anthropic-version" in call.headers


def _anthropic_shape(info: ModelInfo) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(info.created, datetime.UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "display_name": info.name, "created_at": created, "lifecycle": "active"}


def _shape(info: ModelInfo, call: Call) -> dict[str, Any]:
    meta = {
        "n_vocab": info.n_vocab,
        "n_ctx": info.n_ctx,
        "n_ctx_train": info.n_ctx_train,
        "n_embd": info.n_embd,
        "n_params": info.n_params,
        "size": info.n_bytes,
        "loaded": info.loaded,
    }
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "llamacli",
        "aliases": list(info.aliases),
        "tags": list(info.tags),
        "status": _status(info),
        "architecture": {
            "input_modalities": ["text", *["image"] * info.sees, *["audio"] * info.hears],
            "output_modalities": ["text"],
        },
        "meta": meta,
        **(_anthropic_shape(info) if _is_anthropic(call) else {}),
    }

"""Endpoints `/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from llamacli.serve.errors import UnknownModelError
from llamacli.serve.http.call import Call
from llamacli.serve.requests import ModelInfo


async def models(call: Call) -> None:
    """All models that the server has, loaded or not."""
    await call.respond({"object": "list", "data": [_shape(info) for info in call.server.engine.models()]})


async def model(call: Call) -> None:
    """Model of a name or alias."""
    name = call.path_params["name"]
    info = call.server.find_model(name)
    if name not in (info.name, *info.aliases):
        raise UnknownModelError(f"the model {name!r} does not exist")
    await call.respond(_shape(info))


def _shape(info: ModelInfo) -> dict[str, Any]:
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
        "meta": meta,
    }

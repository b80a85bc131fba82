"""Endpoint `/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from llamacli.errors import TokenizerError
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, NotSupportedError
from llamacli.serve.http.call import Call
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.openai.completions import as_prompts, checked_ids
from llamacli.serve.http.replies import Reply, joined
from llamacli.serve.http.schemas.completions import MAX_INPUTS, EmbeddingsRequest, Prompt
from llamacli.serve.http.sse import to_json
from llamacli.serve.requests import EmbeddingRequest, ModelInfo

FORMATS = ("float", "base64")


async def embeddings(call: Call) -> None:
    """Vectors of texts."""
    request = await call.body(EmbeddingsRequest)
    encoding = request.encoding_format or "float"
    if encoding not in FORMATS:
        raise BadRequestError(
            f"encoding_format is {encoding!r}; it must be one of {', '.join(FORMATS)}", "encoding_format"
        )
    if request.dimensions is not None:
        raise BadRequestError("dimensions: the size of vectors is the model's", "dimensions", "unsupported_parameter")
    reply, info = await embedded(call, request.model, request.input)
    body = await call.server.run(_body, reply, info, encoding)
    await call.respond_bytes(body, "application/json")


def _body(reply: Reply, info: ModelInfo, encoding: str) -> bytes:
    """Body of the response.

    Work for the pool, vector by vector: those of thousands of texts would hold up the event loop for a second.
    """
    data = [
        msgspec.Raw(to_json({"object": "embedding", "index": i, "embedding": _encoded(reply.vectors[i], encoding)}))
        for i in sorted(reply.vectors)
    ]
    usage = {"prompt_tokens": reply.usage.prompt, "total_tokens": reply.usage.prompt}
    return to_json({"object": "list", "data": data, "model": info.name, "usage": usage})


async def embedded(call: Call, name: str | None, texts: Prompt) -> tuple[Reply, ModelInfo]:
    """Vectors of texts, in a reply of the engine, and the model."""
    info, model = await call.model(name)
    if not info.embeds:
        raise NotSupportedError(f"the model {info.name!r} has no embeddings")
    inputs = await call.compute(_ids, texts, model, info)
    request = EmbeddingRequest(
        id=call.request_id,
        model=info.name,
        prompts=tuple(map(tuple, inputs)),
        key=call.key,
        adapters=info.adapter_scales,
    )
    async with call.run(request) as events:
        return await joined(events, None, 0), info


def _ids(texts: Prompt, model: Model, info: ModelInfo) -> list[list[int]]:
    inputs = as_prompts(texts, "input", MAX_INPUTS)
    for text in inputs:
        expect_room([text], model, info)
    return [_encode(text, model) for text in inputs]


def _encode(text: str | list[int], model: Model) -> list[int]:
    if text == "":
        raise BadRequestError("input: a text is empty", "input")
    if not isinstance(text, str):
        return checked_ids(text, model, "input")
    try:
        return checked_ids(model.tokenizer.encode(text), model, "input")
    except TokenizerError as error:
        raise BadRequestError(f"input: {error}", "input") from None


def _encoded(vector: Any, encoding: str) -> list[float] | str:
    row = np.asarray(vector, "<f4")
    return base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row.tolist()

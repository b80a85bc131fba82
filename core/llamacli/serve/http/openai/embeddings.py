"""Endpoint `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from llamacli.inputs import Contents
from llamacli.media.encoder import Tile
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, NotSupportedError
from llamacli.serve.http.call import Call
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.pictures import pictured_prompt
from llamacli.serve.http.prompts import as_prompts, encoded, has_pictures, truncated
from llamacli.serve.http.replies import Reply, joined
from llamacli.serve.http.schemas.completions import MAX_INPUTS, MAX_PROMPTS, EmbeddingsRequest, Prompt, PromptText
from llamacli.serve.http.sse import to_json
from llamacli.serve.requests import EmbeddingRequest, ModelInfo

if TYPE_CHECKING:
    from llamacli.tools.embedding import Pooling

FORMATS = ("float", "base64")
Tiles = Mapping[int, tuple[Tile, int]]
NO_TILES: Tiles = {}


async def embeddings(call: Call, request: EmbeddingsRequest) -> None:
    """Vectors of texts."""
    encoding = request.encoding_format or "float"
    if encoding not in FORMATS:
        raise BadRequestError(
            f"encoding_format is {encoding!r}; it must be one of {', '.join(FORMATS)}", "encoding_format"
        )
    reply, info = await embedded(call, request.model, request.input, request.dimensions, request.truncate_prompt_tokens)
    body = await call.server.run(_body, reply, info, encoding)
    await call.respond_bytes(body, "application/json")


def _body(reply: Reply, info: ModelInfo, encoding: str) -> bytes:
    """Body of the response.

    Work for the pool, vector by vector: those of thousands of texts would hold up the event loop for a second.
    """
    data = [
        msgspec.Raw(to_json({"object": "embedding", "index": i, "embedding": as_encoded(reply.vectors[i], encoding)}))
        for i in sorted(reply.vectors)
    ]
    usage = {"prompt_tokens": reply.usage.prompt, "total_tokens": reply.usage.prompt}
    return to_json({"object": "list", "data": data, "model": info.name, "usage": usage})


async def embedded(
    call: Call, name: str | None, texts: Prompt, dimensions: int | None = None, limit: int | None = None
) -> tuple[Reply, ModelInfo]:
    """Vectors of texts, in a reply of the engine, and the model.

    With `dimensions` the first numbers of each, as a vector of length 1 (Matryoshka embeddings); `limit` as in
    `truncated`. Raises BadRequestError for a model whose pooling gives no vector of a text.
    """
    info, model = await call.model(name)
    if info.pooling == "none":
        raise BadRequestError("pooling none gives no vector of a text; /embedding has those of its tokens", "model")
    if info.pooling == "rank":
        raise NotSupportedError(f"the model {info.name!r} ranks texts: see /rerank; --pooling gives vectors")
    if dimensions is not None and dimensions > model.config.n_embd:
        raise BadRequestError(f"dimensions: vectors have {model.config.n_embd} numbers", "dimensions")
    reply = await pooled(call, info, *await seen_inputs(call, texts, model, info, limit))
    if dimensions is not None:
        for i, vector in reply.vectors.items():
            reply.vectors[i] = shortened(vector, dimensions)
    return reply, info


async def pooled(
    call: Call,
    info: ModelInfo,
    prompts: Sequence[Sequence[int]],
    contents: Contents | None = None,
    tiles: Tiles = NO_TILES,
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
) -> Reply:
    """Vectors of prompts, in a reply of the engine.

    The other arguments are fields of `EmbeddingRequest`.
    """
    if not info.embeds:
        raise NotSupportedError(f"the model {info.name!r} has no embeddings")
    request = EmbeddingRequest(
        id=call.request_id,
        model=info.name,
        prompts=tuple(map(tuple, prompts)),
        contents=contents,
        tiles=tiles,
        key=call.key,
        adapters=info.adapter_scales,
        pooling=pooling,
        normalize=normalize,
    )
    async with call.run(request) as events:
        return await joined(events, None, 0)


async def seen_inputs(
    call: Call, texts: Prompt, model: Model, info: ModelInfo, limit: int | None = None
) -> tuple[list[list[int]], Contents | None, Tiles]:
    """Prompts of texts and pictures, the contents of their keys, and tiles.

    Without pictures the first are those of `encoded_inputs`. Raises BadRequestError, PromptTooLongError.
    """
    items = texts if isinstance(texts, list) else [texts]
    pictured = [i for i, item in enumerate(items) if isinstance(item, PromptText) and has_pictures(item)]
    if not pictured:
        return await call.compute(encoded_inputs, texts, model, info, limit), None, NO_TILES
    if limit is not None:
        reason = "prompts with pictures are not truncated"
        raise BadRequestError(f"truncate_prompt_tokens: {reason}", "truncate_prompt_tokens", "unsupported_parameter")
    if len(items) > MAX_PROMPTS or any(isinstance(item, int) for item in items):
        raise BadRequestError(f"input: with pictures, give 1 to {MAX_PROMPTS} objects, texts or lists of ids", "input")
    prompts, contents, tiles = list[list[int]](), Contents(), dict[int, tuple[Tile, int]]()
    for i, item in enumerate(items):
        if isinstance(item, PromptText) and i in pictured:
            name = "input" if item is texts else f"input[{i}]"
            keys, own, more = await pictured_prompt(call, item, model, info, name=name, end=True)
            contents.cells |= own.cells
            tiles |= more
            prompts.append(keys)
        elif not isinstance(item, int):
            prompts += await call.compute(encoded_inputs, [item], model, info, None)
    return prompts, contents, tiles


def encoded_inputs(texts: Prompt, model: Model, info: ModelInfo, limit: int | None) -> list[list[int]]:
    """Token ids of texts; `limit` as in `truncated`. Raises BadRequestError, PromptTooLongError."""
    inputs = as_prompts(texts, "input", MAX_INPUTS)
    if limit is None:
        for text in inputs:
            expect_room([text] if isinstance(text, str) else [[0] * len(text)], model, info)
    n_ctx = info.n_ctx or model.config.n_ctx
    return [truncated(encoded(text, model, "input", end=True), limit, n_ctx) for text in inputs]


def shortened(vectors: Any, n: int) -> Any:
    """First n numbers of vectors, scaled to length 1 (Matryoshka embeddings)."""
    firsts = vectors[..., :n]
    return firsts / np.maximum(np.linalg.norm(firsts, axis=-1, keepdims=True), np.finfo(np.float32).tiny)


def as_encoded(vector: Any, encoding: str) -> Any:
    """Numbers of an array as lists, or in base64."""
    row = np.asarray(vector, "<f4")
    return base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row.tolist()

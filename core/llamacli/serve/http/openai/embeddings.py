"""Endpoint `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, NotSupportedError
from llamacli.serve.http.call import Call
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.prompts import as_prompts, encoded, truncated
from llamacli.serve.http.replies import Reply, joined
from llamacli.serve.http.schemas.completions import MAX_INPUTS, EmbeddingsRequest, Prompt
from llamacli.serve.http.sse import to_json
from llamacli.serve.requests import EmbeddingRequest, ModelInfo

if TYPE_CHECKING:
    from llamacli.tools.embedding import Pooling

FORMATS = ("float", "base64")


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
    reply = await pooled(call, info, await call.compute(encoded_inputs, texts, model, info, limit))
    if dimensions is not None:
        for i, vector in reply.vectors.items():
            reply.vectors[i] = shortened(vector, dimensions)
    return reply, info


async def pooled(
    call: Call,
    info: ModelInfo,
    prompts: Sequence[Sequence[int]],
    pooling: Pooling | None = None,
    *,
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
        key=call.key,
        adapters=info.adapter_scales,
        pooling=pooling,
        normalize=normalize,
    )
    async with call.run(request) as events:
        return await joined(events, None, 0)


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

"""Rerankers and classifiers: endpoints of llama-server, Jina, Cohere, TEI and vLLM."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import TokenizerError
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, NotSupportedError
from llamacli.serve.http.call import Call
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.openai.embeddings import as_encoded, encoded_inputs, pooled, shortened
from llamacli.serve.http.prompts import truncated
from llamacli.serve.http.replies import Reply
from llamacli.serve.http.schemas.completions import MAX_INPUTS
from llamacli.serve.http.schemas.ranking import ClassifyRequest, PoolingRequest, RankRequest, ScoreRequest, Text
from llamacli.serve.requests import ModelInfo
from llamacli.tools.embedding import Pooling
from llamacli.tools.pairs import encode_pair, rerank_template

Array = npt.NDArray[np.float32]

_TASKS = {"embed": Pooling.MEAN, "token_embed": Pooling.NONE, "classify": Pooling.RANK}


async def rerank(call: Call, request: RankRequest) -> None:
    """Texts by their relevance to a query, the most relevant first."""
    given = request.documents or request.texts
    if not given:
        raise BadRequestError("documents: it is required", "documents", "missing_required_parameter")
    name, texts = "documents" if request.documents else "texts", list(map(_text, given))
    info, model = await call.model(request.model)
    _expect_head(info)
    prompts = await call.compute(
        _pairs, [request.query] * len(texts), texts, model, info, request.truncate_prompt_tokens, name
    )
    reply = await pooled(call, info, prompts, pooling=Pooling.RANK)
    scores = [_scores(reply.vectors[i], info, request.use_activation or False)[0] for i in range(len(texts))]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n]
    if request.documents is None:
        await call.respond(
            [{"index": i, "score": scores[i]} | ({"text": texts[i]} if request.return_text else {}) for i in order]
        )
        return
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": texts[i]}} if request.return_documents else {})
        for i in order
    ]
    await call.respond({"id": _id("rerank", call), "object": "list", **_end(reply, info), "results": results})


async def score(call: Call, request: ScoreRequest) -> None:
    """Similarity of pairs: scores of a head, else cosines of vectors."""
    firsts, seconds = _sides(request)
    info, model = await call.model(request.model)
    limit = request.truncate_prompt_tokens
    if info.ranks:
        prompts = await call.compute(_pairs, firsts, seconds, model, info, limit, "text_2")
        reply = await pooled(call, info, prompts, pooling=Pooling.RANK)
        wants = request.use_activation is not False
        scores = [_scores(reply.vectors[i], info, wants)[0] for i in range(len(prompts))]
    else:
        _expect_vectors(info)
        prompts = await call.compute(encoded_inputs, [*firsts, *seconds], model, info, limit)
        reply = await pooled(call, info, prompts)
        n = len(firsts)
        scores = [float(np.dot(reply.vectors[i], reply.vectors[n + i])) for i in range(n)]
    data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
    await call.respond(
        {"id": _id("score", call), "object": "list", "created": _now(), **_end(reply, info), "data": data}
    )


async def classify(call: Call, request: ClassifyRequest) -> None:
    """Classes of texts, with the probability of each."""
    info, model = await call.model(request.model)
    _expect_head(info)
    prompts = await call.compute(encoded_inputs, request.input, model, info, request.truncate_prompt_tokens)
    reply = await pooled(call, info, prompts, pooling=Pooling.RANK)
    data = []
    for i in range(len(prompts)):
        probs = _scores(reply.vectors[i], info, request.use_activation is not False)
        best = int(np.argmax(probs))
        label = info.labels[best] if info.labels else f"LABEL_{best}"
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    await call.respond(
        {"id": _id("classify", call), "object": "list", "created": _now(), **_end(reply, info), "data": data}
    )


async def pooling(call: Call, request: PoolingRequest) -> None:
    """Vectors of texts or of their tokens, or scores of classes."""
    info, model = await call.model(request.model)
    kind = _TASKS[request.task] if request.task else info.pooling or Pooling.MEAN
    if kind == Pooling.MEAN and info.pooling not in (Pooling.NONE, Pooling.RANK):
        kind = info.pooling or kind
    if kind == Pooling.RANK:
        _expect_head(info)
    if request.dimensions is not None and (kind == Pooling.RANK or request.dimensions > model.config.n_embd):
        raise BadRequestError(f"dimensions: vectors have {model.config.n_embd} numbers, scores have none", "dimensions")
    prompts = await call.compute(encoded_inputs, request.input, model, info, request.truncate_prompt_tokens)
    reply = await pooled(call, info, prompts, pooling=kind, normalize=request.normalize is not False)
    data = [
        {"index": i, "object": "pooling", "data": _data(reply.vectors[i], kind, info, request)}
        for i in range(len(prompts))
    ]
    body = {"id": _id("pool", call), "object": "list", "created": _now(), **_end(reply, info), "data": data}
    await call.respond(body)


def _data(vector: Array, kind: Pooling, info: ModelInfo, request: PoolingRequest) -> Any:
    if kind == Pooling.RANK:
        vector = np.array(_scores(vector, info, request.use_activation is not False), np.float32)
    elif request.dimensions is not None:
        vector = shortened(vector, request.dimensions)
    return as_encoded(vector, request.encoding_format or "float")


def _pairs(
    firsts: Sequence[str], seconds: Sequence[str], model: Model, info: ModelInfo, limit: int | None, name: str
) -> list[list[int]]:
    """Token ids of pairs. Raises BadRequestError, PromptTooLongError."""
    template, prompts = rerank_template(model.metadata), []
    n_ctx = info.n_ctx or model.config.n_ctx
    for first, second in zip(firsts, seconds, strict=True):
        if limit is None:
            expect_room([first, second], model, info)
        try:
            ids = encode_pair(model.tokenizer, template, first, second)
        except TokenizerError as error:
            raise BadRequestError(f"{name}: {error}", name) from None
        prompts.append(truncated(ids, limit, n_ctx))
        if not prompts[-1]:
            raise BadRequestError(f"{name}: a pair is empty", name)
    return prompts


def _sides(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Both texts of each pair. Raises BadRequestError."""
    sides = []
    for names in (("text_1", "queries"), ("text_2", "documents", "items")):
        given = [value for name in names if (value := getattr(request, name)) is not None]
        if len(given) != 1:
            raise BadRequestError(f"give one of {' and '.join(names)}", names[0], "missing_required_parameter")
        sides.append([_text(one) for one in (given[0] if isinstance(given[0], list) else given)])
    firsts, seconds = sides
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise BadRequestError(f"text_2: it has {len(seconds)} texts, and text_1 has {len(firsts)}", "text_2")
    if 2 * len(firsts) > MAX_INPUTS:
        raise BadRequestError(f"text_2: {len(seconds)} pairs; at most {MAX_INPUTS // 2} are allowed", "text_2")
    return firsts, seconds


def _scores(given: Array, info: ModelInfo, activate: bool) -> list[float]:
    """Scores, or the probabilities that they stand for.

    These are the sigmoid of one class, or the softmax of several.
    """
    scores: list[float] = given.tolist()
    if not activate or info.normalized:
        return scores
    logits = scores if len(scores) > 1 else [*scores, 0.0]
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers[: len(scores)]]


def _expect_head(info: ModelInfo) -> None:
    if not info.ranks:
        raise NotSupportedError(
            f"the model {info.name!r} has no head for ranking or classes; /v1/embeddings has vectors"
        )


def _expect_vectors(info: ModelInfo) -> None:
    if info.pooling == Pooling.NONE:
        raise NotSupportedError("pooling none gives no vector of a text")


def _text(given: Text) -> str:
    return given if isinstance(given, str) else given.text


def _id(kind: str, call: Call) -> str:
    return f"{kind}-{call.request_id}"


def _end(reply: Reply, info: ModelInfo) -> dict[str, Any]:
    n = reply.usage.prompt
    return {"model": info.name, "usage": {"prompt_tokens": n, "total_tokens": n}}


def _now() -> int:
    return int(time.time())

"""Requests in the envelope of Vertex AI's custom containers, as llama-server's `/predict`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from msgspec import Meta

from llamacli.serve.errors import BadRequestError, ServeError
from llamacli.serve.http.batches import ENDPOINTS, perform
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.inner import Exchange
from llamacli.serve.http.schemas.foreign import Schema

_FORMATS = {"chatCompletions": "/v1/chat/completions", **{path.rpartition("/")[2]: path for path in ENDPOINTS[1:]}}


class PredictRequest(Schema, kw_only=True):
    """Request of `/predict`: other requests, each with its `@requestFormat`.

    That is `chatCompletions`, `completions`, `embeddings` or `responses`. Streams are not for them.
    """

    instances: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=128)]


async def predict(call: Call, request: PredictRequest) -> None:
    """Answer several requests, each with its own result or error."""
    work = asyncio.gather(*(_answer(call, i, instance) for i, instance in enumerate(request.instances)))
    await call.respond({"predictions": await call.unless_gone(_awaited(work))})


async def _awaited(work: asyncio.Future[Any]) -> Any:
    return await work


async def _answer(call: Call, i: int, instance: dict[str, Any]) -> Any:
    name = f"instances[{i}].@requestFormat"
    try:
        wanted = instance.pop("@requestFormat", None)
        path = _FORMATS.get(wanted) if isinstance(wanted, str) else None
        if path is None:
            raise BadRequestError(f"{name}: it must be one of {', '.join(_FORMATS)}", name)
        if instance.get("stream"):
            raise BadRequestError(f"instances[{i}].stream: replies come whole", f"instances[{i}].stream")
    except ServeError as error:
        return openai_body(error)
    exchange = Exchange(path, json.dumps(instance).encode(), f"{call.request_id}-{i}", call.key, call.owner)
    await perform(call.server, exchange)
    return json.loads(exchange.content)

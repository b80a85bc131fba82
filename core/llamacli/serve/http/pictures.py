"""Pictures of chat requests: data URIs and remote addresses, decoded in threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from llamacli.chat.media import Layout
from llamacli.errors import MediaError
from llamacli.media.encoder import LoadedEncoder, Tile
from llamacli.media.pictures import data_of_uri
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, PromptTooLongError
from llamacli.serve.http.call import Call
from llamacli.serve.http.remote_files import fetch
from llamacli.serve.http.schemas.chat import ChatMessage, ContentPart, PicturePart
from llamacli.serve.requests import ModelInfo

T = TypeVar("T")
P = ParamSpec("P")

MAX_PICTURES = 64
"""Most pictures of a request."""


async def layouts(call: Call, messages: Sequence[ChatMessage], model: Model, info: ModelInfo) -> list[Layout]:
    """Text and tiles of the pictures in messages, in order.

    None for a model that does not see. Each is read and cut in a thread of its own pool, one after another. Raises
    BadRequestError that names the part, PromptTooLongError once the context is too short.
    """
    parts = [*_picture_parts(messages)] if info.sees else []
    if len(parts) > MAX_PICTURES:
        raise BadRequestError(f"messages: {len(parts)} pictures; {MAX_PICTURES} are allowed", "messages")
    found: list[Layout] = []
    n_tokens, n_ctx = 0, info.n_ctx or model.config.n_ctx
    for place, part in parts:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url if part.image_url else ""
        if url[:8].lower().startswith(("http://", "https://")):
            if not call.settings.media_url:
                reason = "remote addresses are not read; send a data URI, or start the server with --media-url"
                raise BadRequestError(f"{place}: {reason}", place, "unsupported_content")
            source: str | bytes = await call.unless_gone(_in(call, fetch, url, place))
        else:
            source = url
        layout = await call.unless_gone(_in(call, _layout, model, source, place))
        n_tokens += sum(len(one.ids) for one in layout if isinstance(one, Tile))
        if n_tokens >= n_ctx:
            raise PromptTooLongError(n_tokens, n_ctx, at_least=True)
        found.append(layout)
    return found


async def _in(call: Call, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    work = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(call.server.pictures, work)


def _picture_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, ContentPart]]:
    for i, message in enumerate(messages):
        for k, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "image_url":
                yield part.place if isinstance(part, PicturePart) else f"messages[{i}].content[{k}].image_url", part


def _layout(model: Model, source: str | bytes, place: str) -> Layout:
    try:
        encoder: LoadedEncoder = model.media_encoder()
        return encoder.layout_of_file(data_of_uri(source) if isinstance(source, str) else source)
    except MediaError as error:
        raise BadRequestError(f"{place}: {error}", place, "invalid_image") from None

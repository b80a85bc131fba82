"""Pictures and sound of requests, decoded in threads.

Pictures come as data URIs, remote addresses, or names of files, sound in base64.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from llamacli.chat import openai
from llamacli.chat.media import Layout, prompt_of_pictures
from llamacli.errors import MediaError, TokenizerError
from llamacli.inputs import Contents
from llamacli.media.encoder import LoadedEncoder, Tile
from llamacli.media.files import data_of_base64
from llamacli.media.pictures import MAX_BYTES, Picture, data_of_uri
from llamacli.media.sound import MAX_BYTES as SOUND_BYTES
from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, PromptTooLongError
from llamacli.serve.http.call import Call
from llamacli.serve.http.limits import expect_room
from llamacli.serve.http.prompts import expect_one_text
from llamacli.serve.http.remote_files import fetch
from llamacli.serve.http.schemas.chat import ChatMessage, ContentPart, ForeignPart
from llamacli.serve.http.schemas.completions import PromptText
from llamacli.serve.requests import ModelInfo

T = TypeVar("T")
P = ParamSpec("P")

MARKER = "<__media__>"
"""Place of a picture in a prompt, as llama-server's."""
MAX_PICTURES = 64
"""Most pictures or sounds of a request."""
MEDIA = ("image_url", "input_audio")
"""Types of parts with media."""
_SOUND = "data:;base64,"


async def layouts(call: Call, messages: Sequence[ChatMessage], model: Model, info: ModelInfo) -> list[Layout]:
    """Text and tiles of the media in messages, in order.

    None for a model that reads text only. Each is read and cut in a thread of its own pool, one after another. Raises
    BadRequestError that names the part, PromptTooLongError once the context is too short.
    """
    parts = [*_media_parts(messages)] if info.sees or info.hears else []
    for place, part in parts:
        if part.type == MEDIA[info.sees]:
            has, lacks = ("sees", "hear") if info.sees else ("hears", "see")
            reason = f"not supported, this model {has} and does not {lacks}"
            raise BadRequestError(f"{place}: {reason}", place, "unsupported_content")
    if len(parts) > MAX_PICTURES:
        what = "pictures" if info.sees else "sounds"
        raise BadRequestError(f"messages: {len(parts)} {what}; {MAX_PICTURES} are allowed", "messages")
    return await _layouts(call, [place for place, _ in parts], [_address(part) for _, part in parts], model, info)


async def pictured_prompt(
    call: Call,
    prompt: PromptText,
    model: Model,
    info: ModelInfo,
    *,
    name: str = "prompt",
    add_special: bool = True,
    parse_special: bool = False,
    end: bool = False,
) -> tuple[list[int], Contents, dict[int, tuple[Tile, int]]]:
    """Content keys of a prompt with pictures, as of `prompt_of_pictures`.

    They stand in the places of `MARKER`, or where they are among the parts. `name` is the field; with `end` the keys
    have the tokens that the model expects at a text's end too. Raises BadRequestError, PromptTooLongError.
    """
    if not info.sees:
        raise BadRequestError(f"{name}: not supported, this model reads text only", name, "unsupported_content")
    expect_one_text(prompt, name)
    texts, pictures = _divided(prompt, name)
    expect_room(texts, model, info)
    shown = await _layouts(call, [place for place, _ in pictures], [url for _, url in pictures], model, info)
    encode = functools.partial(model.tokenizer.encode, parse_special=parse_special)

    def keys() -> tuple[list[int], Contents, dict[int, tuple[Tile, int]]]:
        begin = model.tokenizer.encode_prompt if add_special else functools.partial(encode, add_special=False)
        parts: list[int | Tile] = [*begin(texts[0], parse_special=parse_special)]
        for layout, text in zip(shown, texts[1:], strict=True):
            for one in layout:
                parts += encode(one, add_special=False, parse_special=True) if isinstance(one, str) else [one]
            parts += encode(text, add_special=False) if text else []
        parts += encode("")[-1:] if end and model.tokenizer.add_eos else []
        return prompt_of_pictures(parts, lambda text, _: encode(text, add_special=False), model.media_encoder())

    try:
        return await call.compute(keys)
    except TokenizerError as error:
        raise BadRequestError(f"{name}: {error}", name) from None


def _divided(prompt: PromptText, name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Texts around pictures, and place and address of each picture.

    Raises BadRequestError.
    """
    if prompt.content is None:
        texts, data = (prompt.prompt_string or "").split(MARKER), prompt.multimodal_data or []
        if len(texts) != len(data) + 1:
            raise BadRequestError(f"{name}: {len(texts) - 1} times {MARKER} for {len(data)} pictures", name)
        places = (f"{name}.multimodal_data[{i}]" for i in range(len(data)))
        return texts, [(place, f"data:image/unknown;base64,{one}") for place, one in zip(places, data, strict=True)]
    texts, pictures = [""], list[tuple[str, str]]()
    for i, part in enumerate(prompt.content):
        place = f"{name}.content[{i}]"
        if part.type == "image_url":
            texts.append("")
            pictures.append((f"{place}.image_url", _address(part)))
        else:
            texts[-1] += openai.text_of_part(part.type, part.text if part.type == "text" else None, place)
    if len(pictures) > MAX_PICTURES:
        raise BadRequestError(f"{name}: {len(pictures)} pictures; {MAX_PICTURES} are allowed", name)
    return texts, pictures


def _address(part: ContentPart) -> str:
    if part.type == "input_audio":
        return f"{_SOUND}{part.input_audio.data if part.input_audio else ''}"
    return part.image_url if isinstance(part.image_url, str) else part.image_url.url if part.image_url else ""


async def _layouts(
    call: Call, places: Sequence[str], urls: Sequence[str], model: Model, info: ModelInfo
) -> list[Layout]:
    found: list[Layout] = []
    n_tokens, n_ctx = 0, info.n_ctx or model.config.n_ctx
    for place, url in zip(places, urls, strict=True):
        source: str | bytes = url
        if url[:8].lower().startswith(("http://", "https://")):
            if not call.settings.media_url:
                reason = "remote addresses are not read; send a data URI, or start the server with --media-url"
                raise BadRequestError(f"{place}: {reason}", place, "unsupported_content")
            source = await call.unless_gone(in_thread(call, fetch, url, place))
        elif url[:7].lower() == "file://":
            source = await call.unless_gone(in_thread(call, _file, call.settings.media_path, url[7:], place))
        layout = await call.unless_gone(in_thread(call, _layout, model, source, place))
        n_tokens += sum(len(one.ids) for one in layout if isinstance(one, Tile))
        if n_tokens >= n_ctx:
            raise PromptTooLongError(n_tokens, n_ctx, at_least=True)
        found.append(layout)
    return found


async def in_thread(call: Call, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in the pool of threads that decode media."""
    work = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(call.server.pictures, work)


def _media_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, ContentPart]]:
    for i, message in enumerate(messages):
        for k, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type in MEDIA and message.role != "assistant":
                own = f"messages[{i}].content[{k}].{part.type}"
                yield part.place if isinstance(part, ForeignPart) else own, part


def _file(folder: Path | None, name: str, place: str) -> bytes:
    """Bytes of a file in a folder; BadRequestError for others.

    Neither `..` nor links lead out of it.
    """
    if folder is None:
        raise BadRequestError(f"{place}: files are not read; see --media-path", place, "unsupported_content")
    try:
        path = folder.joinpath(name.lstrip("/")).resolve(strict=True)
        if path.is_relative_to(folder.resolve()) and path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise BadRequestError(f"{place}: more than the {MAX_BYTES} bytes of a picture", place, "invalid_image")
            return path.read_bytes()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a circle of links
        pass
    raise BadRequestError(f"{place}: there is no file {name[:200]!a}", place, "invalid_image")


def _layout(model: Model, source: str | bytes, place: str) -> Layout:
    encoder: LoadedEncoder = model.media_encoder()
    try:
        if isinstance(source, str):
            is_picture = encoder.medium is Picture
            source = data_of_uri(source) if is_picture else data_of_base64(source[len(_SOUND) :], SOUND_BYTES, "sound")
        return encoder.layout_of_file(source)
    except MediaError as error:
        code = "invalid_image" if encoder.medium is Picture else "invalid_audio"
        raise BadRequestError(f"{place}: {error}", place, code) from None

"""Pictures in conversations: markers, parts of renderings, rows of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.chat.context import Evaluated, n_positions, plan
from llamacli.chat.template import Rendering
from llamacli.errors import ChatTemplateError, MediaError
from llamacli.inputs import Contents, Inputs
from llamacli.media.encoder import LoadedEncoder, Rows, Tile
from llamacli.media.sound import Sound
from llamacli.tokenizer import Tokenizer

Layout = Sequence[str | Tile]
"""Text and tiles of a picture, in order: `LoadedEncoder.layout`."""


def marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages with markers of pictures, and the picture of each marker.

    A message's content is a text, or a list of texts and pictures, anything that is no text. No text of a message has a
    marker in it.
    """
    number, pictures = 0, dict[str, Any]()
    texts = "\n".join(str({**message, "content": _text(message["content"])}) for message in messages)
    while f"[[media {number} " in texts:
        number += 1
    result = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            result.append(dict(message))
            continue
        parts = []
        for part in content:
            if not isinstance(part, str):
                marker = f"[[media {number} {len(pictures)}]]"
                pictures[marker], part = part, marker
            parts.append(part)
        result.append({**message, "content": "".join(parts)})
    return result, pictures


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def with_pictures(
    rendering: Rendering, pictures: Mapping[str, Layout], encoder: LoadedEncoder, tokenizer: Tokenizer
) -> Rendering:
    """Rendering with the parts of pictures instead of markers.

    Raises ChatTemplateError if the template has left out a marker or repeats one, MediaError if the vocabulary has none
    of the tokens that stand around a picture.
    """
    text = "".join(part for part in rendering.parts if isinstance(part, str))
    for marker in pictures:
        if text.count(marker) != 1:
            what = "repeats" if marker in text else "leaves out"
            raise ChatTemplateError(f"the chat template {what} {_noun(encoder)}")
    parts: list[Any] = []
    for part in rendering.parts:
        parts += _divided(part, pictures, encoder, tokenizer) if isinstance(part, str) else [part]
    return attrs.evolve(rendering, parts=parts)


def _noun(encoder: LoadedEncoder) -> str:
    return "sound" if encoder.medium is Sound else "a picture"


def _divided(
    run: str, pictures: Mapping[str, Layout], encoder: LoadedEncoder, tokenizer: Tokenizer
) -> list[int | str | Tile]:
    places = sorted((run.index(marker), marker) for marker in pictures if marker in run)
    parts: list[int | str | Tile] = []
    done = 0
    for start, marker in places:
        parts += [run[done:start]] if start > done else []
        for part in pictures[marker]:
            parts += tokenizer.split(part, tokenizer.special_ids) if isinstance(part, str) else [part]
        done = start + len(marker)
        if not any(isinstance(part, int) for part in parts):
            around = next((part for part in pictures[marker] if isinstance(part, str)), "")
            if around:
                raise MediaError(
                    f"the vocabulary has no token {around.strip()!r}, with which the encoder {encoder.name!r} "
                    f"surrounds {_noun(encoder)}: it is one of another model"
                )
    return [*parts, run[done:]] if done < len(run) else parts


def media_inputs(
    parts: Sequence[Evaluated],
    n_kept: int,
    encoder: Callable[[], LoadedEncoder],
    rows_of: Callable[[Tile], Rows] | None = None,
) -> Inputs | None:
    """Inputs of tokens from `n_kept` on, None without tiles.

    They have the rows of their tiles, which are encoded unless the encoder has these; or those of `rows_of`. `n_kept`
    does not cut a tile.
    """
    ids: list[int] = []
    tables, rows, keys, spans = [], list[int](), list[int](), list[tuple[int, int]]()
    placed: dict[int, npt.NDArray[np.int32]] = {}
    start = position = 0
    for one in parts:
        stop, first, own = start + len(one.ids), max(0, n_kept - start), position
        start, position = stop, position + n_positions(one)
        if first >= len(one.ids):
            continue
        if not isinstance(one.part, Tile):
            ids += one.ids[first:]
            continue
        loaded, at = encoder(), len(ids)
        tables.append((rows_of or loaded.encode)(one.part))
        rows += range(at, at + len(one.ids))
        keys += one.part.row_keys
        spans += [(at, at + len(one.ids))] if loaded.is_bidirectional else []
        if (places := one.part.positions(own)) is not None:
            placed[at] = places
        ids += [0] * len(one.ids)
    if not tables:
        return None
    positions = np.full((len(ids), 3), -1, np.int32) if placed else None
    for at, places in placed.items():
        assert positions is not None
        positions[at : at + len(places)] = places
    return Inputs.of(ids, embeddings=np.concatenate(tables), rows=rows, keys=keys, spans=spans, positions=positions)


def prompt_of_pictures(
    divided: Sequence[Any], encode: Callable[[str, bool], list[int]], encoder: LoadedEncoder
) -> tuple[list[int], Contents, dict[int, tuple[Tile, int]]]:
    """Content keys of a rendering's parts with tiles, before their encoding.

    Their contents have zeros in the place of the tiles' rows. The last result are the tiles by content key, with the
    index of the row.
    """
    parts = plan([], divided, encode).parts
    inputs = media_inputs(parts, 0, lambda: encoder, lambda tile: np.zeros((len(tile.ids), encoder.n_embd), np.float32))
    contents = Contents()
    if inputs is None:
        return [token for part in parts for token in part.ids], contents, {}
    keys, start, tiles = contents.add(inputs), 0, dict[int, tuple[Tile, int]]()
    for part in parts:
        stop = start + len(part.ids)
        if isinstance(part.part, Tile):
            tiles |= {key: (part.part, i) for i, key in enumerate(keys[start:stop])}
        start = stop
    return keys, contents, tiles

"""Pictures in conversations: markers, parts of renderings, rows of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.chat.context import Evaluated, n_positions
from llamacli.chat.template import Rendering
from llamacli.errors import ChatTemplateError, MediaError
from llamacli.inputs import Inputs
from llamacli.media.encoder import LoadedEncoder, Tile
from llamacli.media.pictures import Picture
from llamacli.tokenizer import Tokenizer

Pictures = dict[str, Picture]
"""Pictures of a conversation by the marker that stands for each in its text."""


def marked(messages: Sequence[dict[str, Any]], images: Sequence[Sequence[Picture]]) -> tuple[list[Any], Pictures]:
    """Messages with markers of images, and the pictures.

    A message has the marker of each image before its text. No text of a message has a marker in it.
    """
    if not any(images):
        return list(messages), {}
    texts, number = "\n".join(map(str, messages)), 0
    while f"[[media {number} " in texts:
        number += 1
    pictures: Pictures = {}
    result = []
    for message, own in zip(messages, images, strict=True):
        markers = [f"[[media {number} {len(pictures) + i}]]" for i in range(len(own))]
        pictures |= zip(markers, own, strict=True)
        result.append({**message, "content": "".join([*markers, message["content"]])})
    return result, pictures


def with_pictures(
    rendering: Rendering, pictures: Mapping[str, Picture], encoder: LoadedEncoder, tokenizer: Tokenizer
) -> Rendering:
    """Rendering with the parts of pictures instead of markers.

    Raises ChatTemplateError if the template has left out a marker or repeats one, MediaError if the vocabulary has none
    of the tokens that stand around a picture.
    """
    text = "".join(part for part in rendering.parts if isinstance(part, str))
    for marker in pictures:
        if text.count(marker) != 1:
            what = "repeats a picture" if marker in text else "leaves out a picture"
            raise ChatTemplateError(f"the chat template {what}")
    parts: list[Any] = []
    for part in rendering.parts:
        parts += _divided(part, pictures, encoder, tokenizer) if isinstance(part, str) else [part]
    return attrs.evolve(rendering, parts=parts)


def _divided(
    run: str, pictures: Mapping[str, Picture], encoder: LoadedEncoder, tokenizer: Tokenizer
) -> list[int | str | Tile]:
    places = sorted((run.index(marker), marker) for marker in pictures if marker in run)
    parts: list[int | str | Tile] = []
    done = 0
    for start, marker in places:
        parts += [run[done:start]] if start > done else []
        for part in encoder.layout(pictures[marker]):
            parts += tokenizer.split(part, tokenizer.special_ids) if isinstance(part, str) else [part]
        done = start + len(marker)
        if not any(isinstance(part, int) for part in parts):
            around = next((part for part in encoder.layout(pictures[marker]) if isinstance(part, str)), "")
            if around:
                raise MediaError(
                    f"the vocabulary has no token {around.strip()!r}, with which the encoder {encoder.name!r} "
                    "surrounds pictures: it is one of another model"
                )
    return [*parts, run[done:]] if done < len(run) else parts


def media_inputs(parts: Sequence[Evaluated], n_kept: int, encoder: Callable[[], LoadedEncoder]) -> Inputs | None:
    """Inputs of tokens from `n_kept` on, None without tiles.

    They have the rows of their tiles, which are encoded unless the encoder has these. `n_kept` does not cut a tile.
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
        tables.append(loaded.encode(one.part))
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

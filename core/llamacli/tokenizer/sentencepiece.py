"""SentencePiece models, tokenizer.model: pieces from their protocol buffer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import attrs

from llamacli.errors import ModelFormatError
from llamacli.gguf.tokens import TokenKind


@attrs.frozen
class Piece:
    """Piece of a vocabulary with its score and type."""

    text: bytes
    score: float
    type: int


def read_sentencepiece(path: Path) -> list[Piece]:
    """Read the pieces of a tokenizer.model; ModelFormatError for what is none.

    It is a `ModelProto`: its field 1 is a piece, of the fields 1 text, 2 score, 3 type.
    """
    data = path.read_bytes()
    try:
        pieces = [_piece(value) for field, value in _fields(data) if field == 1 and isinstance(value, bytes)]
    except (IndexError, ValueError, struct.error) as error:
        raise ModelFormatError(f"{path}: no SentencePiece model: {error}") from error
    if not pieces:
        raise ModelFormatError(f"{path}: no SentencePiece model: it has no pieces")
    return pieces


def read_spec(path: Path, number: int) -> dict[int, int | bytes]:
    """Read a message of a tokenizer.model: field 2 trainer, 3 normalizer.

    Values by the numbers of their fields; ModelFormatError for what is no model.
    """
    data = path.read_bytes()
    try:
        messages = [value for field, value in _fields(data) if field == number and isinstance(value, bytes)]
        return dict(_fields(b"".join(messages)))
    except (IndexError, ValueError) as error:
        raise ModelFormatError(f"{path}: no SentencePiece model: {error}") from error


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, int(TokenKind.NORMAL)
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif field == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, int(TokenKind(kind)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of fields; those of fixed size as bytes."""
    pos = 0
    while pos < len(data):
        tag, pos = _varint(data, pos)
        kind = tag & 7
        if kind == 0:
            value, pos = _varint(data, pos)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, pos = _varint(data, pos)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {pos}")
        if pos + length > len(data):
            raise ValueError(f"a field of {length} bytes at {pos} reaches beyond the end at {len(data)}")
        yield tag >> 3, data[pos : pos + length]
        pos += length


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos
    raise ValueError(f"a number of more than 10 bytes at {pos}")

"""Protocol buffers of SentencePiece models, byte by byte."""

import struct
from pathlib import Path

import pytest

from llamacli.errors import ModelFormatError
from llamacli.tokenizer.sentencepiece import Piece, read_sentencepiece

SCORE = b"\x15" + struct.pack("<f", -1.5)
A = b"\x0a\x01a"


def of(*parts: bytes) -> bytes:
    """Message with a piece of these fields."""
    return b"".join(b"\x0a" + bytes([len(part)]) + part for part in parts)


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (of(A), [Piece(b"a", 0.0, 1)]),
        (of(A + SCORE + b"\x18\x03", b"\x0a\x00"), [Piece(b"a", -1.5, 3), Piece(b"", 0.0, 1)]),
        (of(b"\x18\x06" + SCORE + A), [Piece(b"a", -1.5, 6)]),
        (b"\x0a\x83\x01\x0a\x80\x01" + b"b" * 128, [Piece(b"b" * 128, 0.0, 1)]),
        (b"\x08\x05" + of(A), [Piece(b"a", 0.0, 1)]),
        (b"\x12\x03abc\x99\x02abcdefgh\x1dabcd" + of(A), [Piece(b"a", 0.0, 1)]),
        (of(b"\x08\x05\x10\x05\x1a\x01x" + A + b"\x22\x01x"), [Piece(b"a", 0.0, 1)]),
        (b"\x10" + b"\x80" * 9 + b"\x01" + of(A), [Piece(b"a", 0.0, 1)]),
    ],
)
def test_pieces(data: bytes, pieces: list[Piece], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    assert read_sentencepiece(path) == pieces


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "it has no pieces"),
        (b"\x12\x01a", "it has no pieces"),
        (of(A)[:-1], "a field of 3 bytes at 2 reaches beyond the end at 4"),
        (of(A) + b"\x0a", "index out of range"),
        (of(A) + b"\x13", "wire type 3 at byte 6"),
        (of(A) + b"\x10" + b"\x80" * 10 + b"\x01", "a number of more than 10 bytes at 16"),
        (of(A + b"\x18\x09"), "9 is not a valid TokenKind"),
        (of(A + b"\x12\x01a"), "requires a buffer of 4 bytes"),
    ],
)
def test_damaged_models(data: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=f"no SentencePiece model: .*{text}"):
        read_sentencepiece(path)

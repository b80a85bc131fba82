"""Bytes of pictures and sound within limits, and digests of tiles."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import MediaError


def read_media(given: object, limit: int, medium: str, kinds: str) -> tuple[str, bytes]:
    """Name and bytes of a path, or of bytes.

    `medium`, with its article, and the `kinds` of objects that it may be are those of errors. Raises MediaError for a
    file that cannot be read, for more than `limit` bytes, and for anything else.
    """
    kind = medium.removeprefix("a ")
    name = f"the {kind}"
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        source = _read(Path(given), limit, kind)
    elif isinstance(given, bytes | bytearray | memoryview):
        source = bytes(given)
    else:
        raise MediaError(f"{medium} is {kinds}, not {type(given).__name__}")
    if len(source) > limit:
        raise MediaError(f"{name}: {len(source)} bytes are more than the {limit} of {medium}")
    return name, source


def _read(path: Path, limit: int, kind: str) -> bytes:
    try:
        if not path.is_file():
            raise MediaError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise MediaError(f"{path}: cannot read the {kind}: {error.strerror}") from None


def data_of_base64(text: str, limit: int, medium: str, name: str = "its data") -> bytes:
    """Bytes of a text in base64.

    Raises MediaError for another text, and for more than `limit`.
    """
    if len(text) > limit * 4 // 3 + 4:
        raise MediaError(f"{len(text) * 3 // 4} bytes are more than the {limit} of {medium}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is not base64: {error}") from None


def digest(tile: npt.NDArray[Any]) -> bytes:
    """Digest of a tile's shape and bytes."""
    return hashlib.blake2b(repr(tile.shape).encode() + np.ascontiguousarray(tile).tobytes(), digest_size=32).digest()

"""Format of packed copies: index, places and checksums."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

MAGIC = b"llamacli packed3"
PREFIX = struct.Struct("<16s32sQQ")
"""Magic number with version; SHA-256 of the index, its offset and its length. The index is JSON and ends the file."""

DATA_START, ALIGNMENT = 1 << 21, 64
"""Places of the first tensor, and of the others: huge pages, and cache lines."""

UNIT = 1 << 24
"""Bytes of a tensor that have a sum of their own, and of a file that are written at once."""

HUGE_SHARE = 0.85
"""Share of a copy in huge pages from which it is used where the file system has it, and not read into memory."""

_COLUMNS = 2039
"""Words that a sum adds side by side: a prime, so that moved pages of the file change it."""


class DamagedError(ValueError):
    """Reason why a copy cannot be used."""


@attrs.frozen
class Entry:
    """Place of a tensor in a copy.

    Packed shape, and the sums of the units of each matrix.
    """

    start: int
    shape: list[int]
    sums: list[list[str]]

    @property
    def n_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape)

    def of(self, data: Bytes) -> Bytes:
        """The tensor in a copy's bytes, in its packed shape."""
        return data[self.start : self.start + self.n_bytes].reshape(self.shape)


@attrs.frozen
class Index:
    """Index of a copy: its key, its model's path, its tensors."""

    key: str
    model: str
    tensors: dict[str, Entry]

    @property
    def end(self) -> int:
        """Place behind the last tensor."""
        return max((entry.start + entry.n_bytes for entry in self.tensors.values()), default=0)

    def as_json(self) -> bytes:
        """Contents of the index in the file."""
        return json.dumps(attrs.asdict(self)).encode()


def read_index(data: Bytes) -> Index:
    """Index of a copy.

    Raises DamagedError, also for places that are not in the file.
    """
    if len(data) < PREFIX.size:
        raise DamagedError("it is cut short")
    magic, digest, start, length = PREFIX.unpack(data[: PREFIX.size].tobytes())
    if magic != MAGIC:
        raise DamagedError("it is of another version")
    if start + length != len(data):
        raise DamagedError("it has not the size that it was written with")
    text = data[start:].tobytes()
    if hashlib.sha256(text).digest() != digest:
        raise DamagedError("its index has changed")
    try:
        return _parsed(json.loads(text), start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its index is malformed: {type(error).__name__}") from error


def _parsed(found: Any, end: int) -> Index:
    tensors = {}
    for name, fields in found["tensors"].items():
        if not (isinstance(fields["shape"], list) and isinstance(fields["sums"], list)):
            raise TypeError(name)
        entry = Entry(fields["start"], fields["shape"], fields["sums"])
        if not all(type(number) is int and number >= 0 for number in (entry.start, *entry.shape)):
            raise ValueError(name)
        if entry.start % ALIGNMENT:
            raise ValueError(name)
        if len(entry.shape) != 4 or not 0 <= entry.start <= entry.start + entry.n_bytes <= end:
            raise ValueError(name)
        n_units = -(-math.prod(entry.shape[1:]) // UNIT)
        if [len(sums) for sums in entry.sums] != [n_units] * entry.shape[0]:
            raise ValueError(name)
        tensors[name] = entry
    return Index(str(found["key"]), str(found["model"]), tensors)


def paged(n_bytes: int) -> int:
    """Number of bytes, padded to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def units(data: Bytes) -> Iterator[Bytes]:
    """Parts of some bytes that have a sum each."""
    for start in range(0, len(data), UNIT):
        yield data[start : start + UNIT]


def checksum(data: Bytes) -> str:
    """Checksum of some bytes, as fast as memory is read.

    Words are added in columns: one changed bit or byte always changes it, anything else all but certainly. It protects
    from faults, not from forgery, as no other user can write to the folder.
    """
    n_words = len(data) // 8 // _COLUMNS * _COLUMNS
    columns = np.add.reduce(data[: 8 * n_words].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return hashlib.blake2b(columns.tobytes() + data[8 * n_words :].tobytes(), digest_size=8).hexdigest()


def write_index(file: BinaryIO, path: Path, model: Path, tensors: dict[str, Entry], end: int) -> None:
    """Write the index at `end`, behind the tensors, and then the prefix."""
    text = Index(path.stem, str(model), tensors).as_json()
    file.seek(end)
    file.write(text)
    file.seek(0)
    file.write(PREFIX.pack(MAGIC, hashlib.sha256(text).digest(), end, len(text)))

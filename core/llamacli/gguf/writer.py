"""Streaming writer of GGUF v3, little endian."""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.gguf.header import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    TYPE_ARRAY,
    TYPE_BOOL,
    TYPE_F32,
    TYPE_I32,
    TYPE_STRING,
    TYPE_U8,
    TYPE_U16,
    TYPE_U32,
    TensorInfo,
    padded,
)
from llamacli.quantization import FORMATS
from llamacli.quantization.tensor_types import Bytes

_VERSION = 3


Scalar = bool | int | float | str | bytes | np.int32 | np.uint16
"""Value of a metadata key, stored as bool, uint32, float32, string, int32 or uint16."""


def metadata_pair(key: str, value: Scalar | bytearray | Sequence[Scalar]) -> bytes:
    """Raw bytes of a metadata key with its value.

    Integers are uint32, or int32 where negative and in arrays; floats are float32; bytes are strings too, a
    bytearray is an array of uint8. The elements of others have the type of the first; an empty one is of strings.
    """
    if isinstance(value, bytearray):
        return _string(key) + struct.pack("<IIQ", TYPE_ARRAY, TYPE_U8, len(value)) + value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        kind = TYPE_I32 if type(value) is int and value < 0 else _type_of(value)
        return _string(key) + struct.pack("<I", kind) + _packed(kind, [value])
    first = value[0] if value else ""
    kind = TYPE_I32 if type(first) is int else _type_of(first)
    return _string(key) + struct.pack("<IIQ", TYPE_ARRAY, kind, len(value)) + _packed(kind, value)


def _type_of(value: Scalar) -> int:
    if isinstance(value, str | bytes):
        return TYPE_STRING
    if isinstance(value, bool | float):
        return TYPE_BOOL if isinstance(value, bool) else TYPE_F32
    return TYPE_U32 if isinstance(value, int) else TYPE_U16 if isinstance(value, np.uint16) else TYPE_I32


def _packed(kind: int, values: Sequence[Scalar]) -> bytes:
    if kind == TYPE_STRING:
        return b"".join(_string(value) for value in values if isinstance(value, str | bytes))
    code = {TYPE_BOOL: "?", TYPE_U16: "H", TYPE_U32: "I", TYPE_I32: "i", TYPE_F32: "f"}[kind]
    return struct.pack(f"<{len(values)}{code}", *values)


def write_gguf(
    file: BinaryIO,
    pairs: Sequence[bytes],
    tensors: Sequence[TensorInfo],
    data: Callable[[TensorInfo], Iterable[Bytes]],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Write a GGUF file: header, metadata, tensor infos, tensor data.

    `file` is at its start. `pairs` are metadata keys with their values as GGUFFile.pair() and metadata_pair() return
    them; one of them must state `alignment` unless it is the default. `data` yields a tensor's bytes in parts,
    written as they come. The offsets of `tensors` are ignored. InvalidRequestError when a tensor's bytes are not as
    many as its `n_bytes`.
    """
    header = packed_header(pairs, tensors, alignment=alignment)
    file.write(header.ljust(padded(len(header), alignment), b"\0"))
    for info in tensors:
        written = 0
        for part in data(info):
            file.write(part.data)
            written += part.nbytes
        if written != info.n_bytes:
            raise InvalidRequestError(f"tensor {info.name!r} has {info.n_bytes} bytes, {written} were given")
        file.write(bytes(padded(written, alignment) - written))


def packed_header(
    pairs: Sequence[bytes], tensors: Sequence[TensorInfo], *, alignment: int = DEFAULT_ALIGNMENT
) -> bytes:
    """Bytes before the tensor data, without the padding at their end."""
    start = struct.pack("<IQQ", _VERSION, len(tensors), len(pairs))
    return b"".join((MAGIC, start, *pairs, _infos(tensors, alignment)))


def _infos(tensors: Iterable[TensorInfo], alignment: int) -> bytes:
    infos, offset = [], 0
    for info in tensors:
        if FORMATS[info.type].trailer:
            raise InvalidRequestError(f"tensor {info.name!r}: tensors of type {info.type.name} cannot be written")
        infos.append(_string(info.name))
        infos.append(struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape)))
        infos.append(struct.pack("<IQ", info.type, offset))
        offset += padded(info.n_bytes, alignment)
    return b"".join(infos)


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw

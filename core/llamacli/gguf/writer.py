"""Streaming writer of GGUF v3, little endian."""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from llamacli.errors import InvalidRequestError
from llamacli.gguf.header import DEFAULT_ALIGNMENT, MAGIC, TYPE_ARRAY, TYPE_STRING, TYPE_U32, TensorInfo, padded
from llamacli.quantization.tensor_types import Bytes

_VERSION = 3


def metadata_pair(key: str, value: int | str | Sequence[str]) -> bytes:
    """Raw bytes of a metadata key with a uint32, string or strings."""
    if isinstance(value, int):
        return _string(key) + struct.pack("<II", TYPE_U32, value)
    if isinstance(value, str):
        return _string(key) + struct.pack("<I", TYPE_STRING) + _string(value)
    head = struct.pack("<IIQ", TYPE_ARRAY, TYPE_STRING, len(value))
    return _string(key) + head + b"".join(map(_string, value))


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
    header = b"".join(
        (MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(pairs)), *pairs, _infos(tensors, alignment))
    )
    file.write(header.ljust(padded(len(header), alignment), b"\0"))
    for info in tensors:
        written = 0
        for part in data(info):
            file.write(part.data)
            written += part.nbytes
        if written != info.n_bytes:
            raise InvalidRequestError(f"tensor {info.name!r} has {info.n_bytes} bytes, {written} were given")
        file.write(bytes(padded(written, alignment) - written))


def _infos(tensors: Iterable[TensorInfo], alignment: int) -> bytes:
    infos, offset = [], 0
    for info in tensors:
        infos.append(_string(info.name))
        infos.append(struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape)))
        infos.append(struct.pack("<IQ", info.type, offset))
        offset += padded(info.n_bytes, alignment)
    return b"".join(infos)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw

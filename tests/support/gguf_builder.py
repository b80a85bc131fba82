"""GGUF files byte by byte, broken ones above all.

Every count, length, type and offset can be a wrong one.
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import attrs

from llamacli.quantization import FORMATS, TensorType


class Kind(IntEnum):
    """GGUF's types of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


NUMBERS = {
    Kind.U8: "B", Kind.I8: "b", Kind.U16: "H", Kind.I16: "h", Kind.U32: "I", Kind.I32: "i", Kind.F32: "f",
    Kind.BOOL: "?", Kind.U64: "Q", Kind.I64: "q", Kind.F64: "d",
}  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value % (1 << 32))


def u64(value: int) -> bytes:
    return struct.pack("<Q", value % (1 << 64))


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def payload(kind: int, value: Any) -> bytes:
    return text(value) if kind == Kind.STRING else struct.pack(f"<{NUMBERS[Kind(kind)]}", value)


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    """Encode a key and its value.

    A value given as bytes (of any kind but a string) is written as it is.
    """
    raw = value if isinstance(value, bytes) and kind != Kind.STRING else payload(kind, value)
    return text(key) + u32(kind) + raw


def array_pair(key: str | bytes, kind: int, values: Sequence[Any], length: int | None = None) -> bytes:
    body = b"".join(payload(kind, value) for value in values)
    return text(key) + u32(Kind.ARRAY) + u32(kind) + u64(len(values) if length is None else length) + body


def alignment_pair(alignment: int) -> bytes:
    return pair("general.alignment", Kind.U32, alignment)


def padding(n_bytes: int, alignment: int) -> bytes:
    return bytes(-n_bytes % alignment)


@attrs.frozen
class Tensor:
    """Tensor as the file declares it, and the bytes that it has.

    `ne` is in GGUF's order, innermost first.
    Without an `offset` it follows the one before; without `data` it gets as many counting bytes as it needs.
    """

    name: str | bytes
    ne: Sequence[int] = (4,)
    type: int = TensorType.F32
    offset: int | None = None
    data: bytes | None = None
    n_dims: int | None = None

    def content(self) -> bytes:
        if self.data is not None:
            return self.data
        fmt = FORMATS[self.type]
        return bytes(i % 256 for i in range(math.prod(self.ne) // fmt.block_size * fmt.type_size))


def gguf_bytes(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_kv: int | None = None,
    with_data: bool = True,
) -> bytes:
    """Return a whole file, laid out with this alignment; `alignment_pair` declares one."""
    infos, data = b"", b""
    for tensor in tensors:
        n_dims = len(tensor.ne) if tensor.n_dims is None else tensor.n_dims
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += text(tensor.name) + u32(n_dims) + b"".join(map(u64, tensor.ne)) + u32(tensor.type) + u64(offset)
        data += tensor.content()
        data += padding(len(data), alignment)
    head = magic + u32(version) + u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(pairs) if n_kv is None else n_kv) + b"".join(pairs) + infos
    return head + padding(len(head), alignment) + (data if with_data else b"")

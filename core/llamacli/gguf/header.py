"""Parser of the GGUF header: version, key-value pairs, tensor infos.

The layout is that of the GGUF specification, versions 2 and 3, little endian. All size arithmetic is in Python's
integers, and every size is compared with the remaining bytes of the file before anything is read or allocated for it.
"""

import math
import struct
from enum import IntEnum
from mmap import mmap
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.gguf.metadata import Metadata, StringArray, shown
from llamacli.gguf.string_ends import string_ends
from llamacli.quantization import FORMATS, TensorType, nbytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MAX_STRING_BYTES = MAX_ARRAY_LENGTH = 1 << 30
MAX_ELEMENTS = ((1 << 63) - 1) // 8
"""Keeps the byte size of a float64 array of any tensor's shape within a signed 64-bit integer."""

_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

TYPE_U8, TYPE_U16, TYPE_U32, TYPE_I32, TYPE_F32, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY = 0, 2, 4, 5, 6, 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    kind: np.dtype(name)
    for kind, name in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", "", "", "<u8", "<i8", "<f8"))
    if name  # the others are TYPE_STRING and TYPE_ARRAY
}


@attrs.frozen
class TensorInfo:
    """Name, shape, type and place of a tensor in its file.

    `shape` is row-major, (rows, ..., width): the reverse of GGUF's `ne`. `offset` is in bytes from the start of a GGUF
    file; other formats do not use it.
    """

    name: str
    shape: tuple[int, ...]
    type: IntEnum
    n_bytes: int
    offset: int = 0


@attrs.frozen
class Header:
    """Contents of a file before the tensor data; `tensors` in file order.

    `spans` are the byte ranges [start, end) of metadata keys with their values in the file.
    """

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    spans: dict[str, tuple[int, int]]


def _scale_of(info: TensorInfo) -> TensorInfo:
    """Scale that lies behind a tensor of a format with a trailer."""
    name = f"{info.name.removesuffix('.weight')}.scale"
    return TensorInfo(name, (1,), TensorType.F32, 4, info.offset + info.n_bytes)


def parse_header(data: bytes | mmap, source: str) -> Header:
    """Parse the header at the start of `data`, the whole file.

    The tensor data may be truncated; only the header is checked. ModelFormatError, naming `source`, for anything that
    the format does not allow.
    """
    return _Parser(data, source).header()


class _Parser:
    def __init__(self, data: bytes | mmap, source: str):
        self.data, self.size, self.source, self.pos = data, len(data), source, 0

    def header(self) -> Header:
        if (magic := self.data[:4]) != MAGIC:
            raise self.error(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.pos = len(MAGIC)
        version = self.u32("version")
        if version & 0xFFFF == 0 and version:
            raise self.error("big-endian GGUF is not supported")
        if version not in VERSIONS:
            raise self.error(f"GGUF version {version} is not supported (versions {VERSIONS} are)")
        n_tensors, n_pairs = self.u64("n_tensors"), self.u64("n_kv")
        if n_tensors * _MIN_TENSOR_BYTES + n_pairs * _MIN_PAIR_BYTES > self.size - self.pos:
            raise self.error(f"{n_tensors} tensors and {n_pairs} metadata keys do not fit into {self.size} bytes")
        alignment = DEFAULT_ALIGNMENT
        metadata: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for index in range(n_pairs):
            start = self.pos
            key = self.text(f"metadata key {index}", MAX_KEY_BYTES)
            if not key:
                raise self.error(f"metadata key {index} is empty")
            if key in metadata:
                raise self.error(f"metadata key {shown(key)} appears twice")
            kind = self.u32(f"type of metadata key {shown(key)}")
            metadata[key] = self.value(f"metadata key {shown(key)}", kind)
            spans[key] = start, self.pos
            if key == "general.alignment":
                alignment = self.alignment(metadata[key], kind)
        tensors = self.tensors(n_tensors, alignment)
        return Header(version, alignment, Metadata(metadata, self.source), tensors, spans)

    def alignment(self, value: Any, kind: int) -> int:
        if kind != TYPE_U32:
            raise self.error(f"general.alignment must be a 32-bit unsigned integer, not of type {kind}")
        if value.bit_count() != 1 or value > MAX_ALIGNMENT:
            raise self.error(f"general.alignment is {value}, not a power of 2 up to {MAX_ALIGNMENT}")
        return int(value)

    def tensors(self, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        declared: dict[str, TensorInfo] = {}
        end = 0
        for index in range(n_tensors):
            info = self.tensor(index)
            if info.offset != end:
                raise self.error(f"tensor {info.name!r} has offset {info.offset}, not {end}, the end of the last one")
            trailer = FORMATS[info.type].trailer
            end += padded(info.n_bytes + trailer, alignment)
            for one in (info, _scale_of(info)) if trailer else (info,):
                if one.name in declared:
                    raise self.error(f"tensor {one.name!r} appears twice")
                declared[one.name] = one
        start = padded(self.pos, alignment)
        return {name: attrs.evolve(info, offset=start + info.offset) for name, info in declared.items()}

    def tensor(self, index: int) -> TensorInfo:
        """Parse a tensor info; its offset is relative to the tensor data."""
        name = self.text(f"name of tensor {index}", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        n_dims = self.u32(f"n_dims of {what}")
        if n_dims > MAX_DIMS:
            raise self.error(f"{what} has {n_dims} dimensions, more than {MAX_DIMS}")
        shape = tuple(self.u64(f"shape of {what}") for _ in range(n_dims))[::-1]
        if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
            raise self.error(f"{what} has the impossible shape {list(shape)}")
        type_id = self.u32(f"type of {what}")
        if type_id not in FORMATS:
            raise self.error(f"{what} has the unknown type {type_id}")
        try:
            n_bytes = nbytes(type_id, shape)
        except ModelFormatError as error:
            raise self.error(f"{what} with shape {list(shape)}: {error}") from None
        return TensorInfo(name, shape, FORMATS[type_id].type, n_bytes, self.u64(f"offset of {what}"))

    def value(self, what: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(what, kind, 1)[0].item()
        if kind == TYPE_STRING:
            return self.string(what, MAX_STRING_BYTES).decode(errors="replace")
        if kind != TYPE_ARRAY:
            raise self.error(f"{what} has the unknown type {kind}")
        kind, length = self.u32(f"element type of {what}"), self.u64(f"length of {what}")
        if length > MAX_ARRAY_LENGTH:
            raise self.error(f"{what} has {length} elements, more than {MAX_ARRAY_LENGTH}")
        if kind in _NUMBERS:
            return self.numbers(what, kind, length)
        if kind == TYPE_STRING:
            return self.strings(what, length)
        if kind == TYPE_ARRAY:
            raise self.error(f"{what} is an array of arrays: not allowed in GGUF")
        raise self.error(f"{what} is an array of the unknown type {kind}")

    def numbers(self, what: str, kind: int, length: int) -> npt.NDArray[Any]:
        dtype = _NUMBERS[kind]
        start = self.skip(what, length * dtype.itemsize)
        numbers: npt.NDArray[Any] = np.frombuffer(self.data[start : self.pos], dtype)
        if kind == TYPE_BOOL:
            numbers = numbers != 0
            numbers.flags.writeable = False
        return numbers

    def strings(self, what: str, length: int) -> StringArray:
        if length * 8 > self.size - self.pos:
            raise self.error(f"{what} has {length} strings, more than fit into the rest of the file")
        start = self.pos
        ends = string_ends(self.data, start, length)
        n_whole = int(np.searchsorted(ends, self.size - start, "right"))
        if n_whole < length:
            raise self.error(f"{what}: string {n_whole} of {length} reaches beyond the end of the file")
        self.pos += int(ends[-1]) if length else 0
        return StringArray(self.data[start : self.pos], ends)

    def text(self, what: str, limit: int) -> str:
        try:
            return self.string(what, limit).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {shown(error.object)}") from None

    def string(self, what: str, limit: int) -> bytes:
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.error(f"{what} has {length} bytes, more than {limit}")
        start = self.skip(what, length)
        return self.data[start : self.pos]

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.skip(what, 4))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.skip(what, 8))[0]
        return value

    def skip(self, what: str, n_bytes: int) -> int:
        """Advance over `n_bytes` that must exist; returns their start."""
        start = self.pos
        if n_bytes > self.size - start:
            raise self.error(f"truncated: {what} needs {n_bytes} bytes at {start}, {self.size - start} are left")
        self.pos = start + n_bytes
        return start

    def error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self.source}: {message}")


def padded(n: int, alignment: int) -> int:
    """Round n up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment

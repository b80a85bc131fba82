"""Tensor types of ggml: ids, block sizes, dequantization and quantization.

The type ids, names, block sizes and bytes per block are ggml's. `gguf.quants` is the reference for the block formats'
meaning and is called for them; it is imported at first use, because most runs never dequantize through it and the
import would delay every start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, ModelFormatError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of the 16 codes of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl)."""

_CHUNK = 1 << 18
"""Numbers per call of `gguf.quants`, so that its intermediate results stay in the CPU cache."""


class TensorType(IntEnum):
    """ggml's tensor types by the id that GGUF files store."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class PackingDescription(Protocol):
    """Description that kernels are made from: a `llamacli.kernels.packing_formats.IntegerPacking`."""

    @property
    def block(self) -> int:
        """Numbers in a block."""

    @property
    def file_bytes(self) -> int:
        """Bytes of a block in the file."""


@attrs.frozen
class QuantFormat:
    """Storage format of a tensor type.

    A row of `n` numbers is `n / block_size` blocks of `type_size` bytes. `dequantize` takes uint8 [n_rows, row_bytes]
    and returns float32 [n_rows, n_columns], perhaps a view of its input; `quantize` does the reverse. Either is None
    if not implemented.

    `packing` is for formats of plugins, and returns the description that kernels are made from; it is called when a
    tensor of the type is loaded for them, so that its imports (Numba, for example) are deferred. Tensors of
    a plugin's format without it are requantized to Q8_0.

    A format with a `trailer` has so many bytes behind each tensor in files, of which the first four are the float32
    scale of the whole: the file has it as the tensor `{name}.scale`. Such tensors are read, and not written.
    """

    type: IntEnum
    block_size: int
    type_size: int
    dequantize: Callable[[Bytes], Floats] | None = None
    quantize: Callable[[Floats], Bytes] | None = None
    packing: Callable[[], PackingDescription] | None = None
    trailer: int = 0

    @property
    def name(self) -> str:
        """The type's name, as in `Q4_K`."""
        return self.type.name


def _plain(tensor_type: TensorType, dtype: str, *, quantizable: bool = False) -> QuantFormat:
    def dequantize(raw: Bytes) -> Floats:
        return raw.view(dtype).astype(np.float32, copy=False)

    def quantize(x: Floats) -> Bytes:
        return np.ascontiguousarray(x, dtype).view(np.uint8)

    size = np.dtype(dtype).itemsize
    return QuantFormat(tensor_type, 1, size, dequantize, quantize if quantizable else None)


def from_bf16(words: npt.NDArray[np.uint16]) -> Floats:
    """Convert bfloat16 words to float32."""
    widened = words.astype("<u4")
    widened <<= 16
    return widened.view(np.float32)


def to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 words, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, "<f4").view("<u4")
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits >> 16 | 64, rounded).astype("<u2")


def _scaled(raw: Bytes, codes: npt.NDArray[np.integer[Any]], scales: Bytes, dtype: str) -> Floats:
    """Integers times the scale of their block.

    `codes` is [n_blocks, block_size], `scales` uint8 [n_blocks, size of dtype].
    """
    factors = np.ascontiguousarray(scales).view(dtype).astype(np.float32)
    return (factors * codes.astype(np.float32)).reshape(len(raw), -1)


def _dequantize_q1_0(raw: Bytes) -> Floats:
    """Float16 scale, then a bit for each number: 1 or -1."""
    blocks = raw.reshape(-1, 18)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return _scaled(raw, 2 * bits.astype(np.int8) - 1, blocks[:, :2], "<f2")


def _dequantize_q2_0(raw: Bytes) -> Floats:
    """Float16 scale, then 2 bits for each number: -1 to 2."""
    blocks = raw.reshape(-1, 18)
    pairs = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    return _scaled(raw, pairs.reshape(-1, 64).astype(np.int8) - 1, blocks[:, :2], "<f2")


def _dequantize_q8_k(raw: Bytes) -> Floats:
    """Float32 scale, then int8; their sums, which follow, are for products."""
    blocks = raw.reshape(-1, 292)
    return _scaled(raw, blocks[:, 4:260].view(np.int8), blocks[:, :4], "<f4")


def _blocks(tensor_type: TensorType, block_size: int, type_size: int, *, quantizable: bool = False) -> QuantFormat:
    """Format of blocks that `gguf.quants` implements."""

    def dequantize(raw: Bytes) -> Floats:
        from gguf import GGMLQuantizationType, quants

        n_rows, n_columns = len(raw), raw.shape[1] // type_size * block_size
        x = np.empty((n_rows, n_columns), np.float32)
        step = max(1, _CHUNK // n_columns)
        for row in range(0, n_rows, step):
            x[row : row + step] = quants.dequantize(raw[row : row + step], GGMLQuantizationType(tensor_type))
        return x

    def quantize(x: Floats) -> Bytes:
        from gguf import GGMLQuantizationType, quants

        raw: Bytes = quants.quantize(x, GGMLQuantizationType(tensor_type))
        return raw

    return QuantFormat(tensor_type, block_size, type_size, dequantize, quantize if quantizable else None)


_BLOCKS = (
    ("Q4_0", 32, 18), ("Q4_1", 32, 20), ("Q5_0", 32, 22), ("Q5_1", 32, 24), ("Q8_0", 32, 34), ("Q2_K", 256, 84),
    ("Q3_K", 256, 110), ("Q4_K", 256, 144), ("Q5_K", 256, 176), ("Q6_K", 256, 210), ("IQ1_S", 256, 50),
    ("IQ1_M", 256, 56), ("IQ2_XXS", 256, 66), ("IQ2_XS", 256, 74), ("IQ2_S", 256, 82), ("IQ3_XXS", 256, 98),
    ("IQ3_S", 256, 110), ("IQ4_NL", 32, 18), ("IQ4_XS", 256, 136), ("TQ1_0", 256, 54), ("TQ2_0", 256, 66),
    ("MXFP4", 32, 17), ("NVFP4", 64, 36),
)  # fmt: skip
"""Types that `gguf.quants` implements: numbers and bytes of a block."""

_FORMATS = (
    _plain(TensorType.F32, "<f4", quantizable=True),
    _plain(TensorType.F16, "<f2", quantizable=True),
    _plain(TensorType.F64, "<f8"),
    _plain(TensorType.I8, "<i1"),
    _plain(TensorType.I16, "<i2"),
    _plain(TensorType.I32, "<i4"),
    _plain(TensorType.I64, "<i8"),
    QuantFormat(TensorType.BF16, 1, 2, lambda raw: from_bf16(raw.view("<u2")), lambda x: to_bf16(x).view(np.uint8)),
    *(_blocks(TensorType[name], *sizes, quantizable=name in ("Q4_0", "Q8_0")) for name, *sizes in _BLOCKS),
    # Types that `gguf.quants` does not implement; of Q8_1, the form of activations in GGML, the size only.
    QuantFormat(TensorType.Q8_1, 32, 36),
    QuantFormat(TensorType.Q8_K, 256, 292, _dequantize_q8_k),
    QuantFormat(TensorType.Q1_0, 128, 18, _dequantize_q1_0),
    QuantFormat(TensorType.Q2_0, 64, 18, _dequantize_q2_0),
)

FORMATS: dict[int, QuantFormat] = {fmt.type: fmt for fmt in _FORMATS}
"""Formats by type id. A plugin registers its own before files that use it are opened."""


def _format(tensor_type: int) -> QuantFormat:
    try:
        return FORMATS[tensor_type]
    except KeyError:
        raise ModelFormatError(f"unknown tensor type {tensor_type}") from None


def block_size(tensor_type: int) -> int:
    """Numbers per block."""
    return _format(tensor_type).block_size


def type_size(tensor_type: int) -> int:
    """Bytes per block."""
    return _format(tensor_type).type_size


def nbytes(tensor_type: int, shape: Sequence[int]) -> int:
    """Bytes of a tensor of row-major `shape`; ModelFormatError for incomplete blocks."""
    fmt = _format(tensor_type)
    width = shape[-1] if shape else 1
    if width % fmt.block_size:
        raise ModelFormatError(f"rows of {width} numbers are not a multiple of {fmt.name}'s block of {fmt.block_size}")
    return math.prod(shape) // fmt.block_size * fmt.type_size


def dequantize(raw: npt.NDArray[Any], tensor_type: int) -> Floats:
    """Dequantize uint8 [n_rows, row_bytes] to float32, bit-equal to `gguf.quants`.

    Returns float32 [n_rows, n_columns]; of an F32 tensor a view of `raw`. ModelFormatError when `row_bytes` is not a
    multiple of the block's bytes, or when the type has no dequantizer.
    """
    fmt = _format(tensor_type)
    if fmt.dequantize is None:
        raise ModelFormatError(f"tensors of type {fmt.name} cannot be dequantized")
    if raw.ndim != 2 or raw.dtype != np.uint8:
        raise InvalidRequestError(f"expected uint8 [n_rows, row_bytes], not {raw.dtype} {list(raw.shape)}")
    if raw.shape[1] % fmt.type_size:
        raise ModelFormatError(f"rows of {raw.shape[1]} bytes are not a multiple of {fmt.name}'s {fmt.type_size}")
    if raw.size == 0:
        return np.empty((raw.shape[0], raw.shape[1] // fmt.type_size * fmt.block_size), np.float32)
    with np.errstate(all="ignore"):  # NaN and infinite scales propagate as in the reference
        return fmt.dequantize(raw)


def quantize(x: Floats, tensor_type: int) -> Bytes:
    """Quantize float32 [n_rows, n_columns] to uint8, bit-equal to `gguf.quants`.

    Returns uint8 [n_rows, row_bytes]. InvalidRequestError when the type has no quantizer; ModelFormatError when the row
    length is not a multiple of the block size.
    """
    fmt = _format(tensor_type)
    if fmt.quantize is None:
        raise InvalidRequestError(f"cannot quantize to {fmt.name}")
    row_bytes = nbytes(tensor_type, x.shape[-1:])
    if x.size == 0:
        return np.empty((x.shape[0], row_bytes), np.uint8)
    with np.errstate(all="ignore"):
        return fmt.quantize(x)

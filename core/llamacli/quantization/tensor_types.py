"""One descriptor per tensor format, and the functions that look it up.

The type ids, names, block sizes and bytes per block are ggml's. `gguf.quants` is the reference for the block formats'
meaning and is called for them; it is imported at first use, because most runs never dequantise through it and the
import would delay every start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, ModelFormatError

if TYPE_CHECKING:
    from llamacli.kernels.packing_formats import IntegerPacking

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 1 << 18
"""Rows are dequantised in groups of about this size, so that intermediate results stay in the processor's cache."""


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


@attrs.frozen
class QuantFormat:
    """How one tensor type lays its numbers out.

    A row of `n` numbers is `n / block_size` blocks of `type_size` bytes. `dequantize` takes uint8 [n_rows, row_bytes]
    and returns float32 [n_rows, n_columns], perhaps a view of its input; `quantize` does the reverse. Either is None
    where it is not to be had.

    `packing` is for formats of plugins, and returns the description that kernels are made from; it is called when a
    tensor of the type is loaded for them, so that what it imports (Numba, for one) is not imported in vain. Tensors of
    a plugin's format without it are requantised to Q8_0.
    """

    type: IntEnum
    block_size: int
    type_size: int
    dequantize: Callable[[Bytes], Floats] | None = None
    quantize: Callable[[Floats], Bytes] | None = None
    packing: Callable[[], IntegerPacking] | None = None

    @property
    def name(self) -> str:
        """The type's name, as in `Q4_K`."""
        return self.type.name


def _plain(tensor_type: TensorType, dtype: str, *, quantizable: bool = False) -> QuantFormat:
    """Single numbers that NumPy knows."""

    def dequantize(raw: Bytes) -> Floats:
        return raw.view(dtype).astype(np.float32, copy=False)

    def quantize(x: Floats) -> Bytes:
        return np.ascontiguousarray(x, dtype).view(np.uint8)

    size = np.dtype(dtype).itemsize
    return QuantFormat(tensor_type, 1, size, dequantize, quantize if quantizable else None)


def _dequantize_bf16(raw: Bytes) -> Floats:
    widened = raw.view("<u2").astype(np.uint32)
    widened <<= 16
    return widened.view(np.float32)


def _quantize_bf16(x: Floats) -> Bytes:
    """The upper halves of float32, rounded to nearest, ties to even; NaN stays NaN by a bit that is always set."""
    bits = np.ascontiguousarray(x, "<f4").view("<u4")
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits >> 16 | 64, rounded).astype("<u2").view(np.uint8)


def _blocks(tensor_type: TensorType, block_size: int, type_size: int, *, quantizable: bool = False) -> QuantFormat:
    """Blocks that `gguf.quants` knows."""

    def dequantize(raw: Bytes) -> Floats:
        from gguf import GGMLQuantizationType, quants

        n_rows, n_columns = len(raw), raw.shape[1] // type_size * block_size
        x = np.empty((n_rows, n_columns), np.float32)
        step = max(1, _NUMBERS_AT_ONCE // n_columns)
        for row in range(0, n_rows, step):
            x[row : row + step] = quants.dequantize(raw[row : row + step], GGMLQuantizationType(tensor_type))
        return x

    def quantize(x: Floats) -> Bytes:
        from gguf import GGMLQuantizationType, quants

        raw: Bytes = quants.quantize(x, GGMLQuantizationType(tensor_type))
        return raw

    return QuantFormat(tensor_type, block_size, type_size, dequantize, quantize if quantizable else None)


_FORMATS = (
    _plain(TensorType.F32, "<f4", quantizable=True),
    _plain(TensorType.F16, "<f2", quantizable=True),
    _plain(TensorType.F64, "<f8"),
    _plain(TensorType.I8, "<i1"),
    _plain(TensorType.I16, "<i2"),
    _plain(TensorType.I32, "<i4"),
    _plain(TensorType.I64, "<i8"),
    QuantFormat(TensorType.BF16, 1, 2, _dequantize_bf16, _quantize_bf16),
    _blocks(TensorType.Q4_0, 32, 18, quantizable=True),
    _blocks(TensorType.Q4_1, 32, 20),
    _blocks(TensorType.Q5_0, 32, 22),
    _blocks(TensorType.Q5_1, 32, 24),
    _blocks(TensorType.Q8_0, 32, 34, quantizable=True),
    _blocks(TensorType.Q2_K, 256, 84),
    _blocks(TensorType.Q3_K, 256, 110),
    _blocks(TensorType.Q4_K, 256, 144),
    _blocks(TensorType.Q5_K, 256, 176),
    _blocks(TensorType.Q6_K, 256, 210),
    _blocks(TensorType.IQ1_S, 256, 50),
    _blocks(TensorType.IQ1_M, 256, 56),
    _blocks(TensorType.IQ2_XXS, 256, 66),
    _blocks(TensorType.IQ2_XS, 256, 74),
    _blocks(TensorType.IQ2_S, 256, 82),
    _blocks(TensorType.IQ3_XXS, 256, 98),
    _blocks(TensorType.IQ3_S, 256, 110),
    _blocks(TensorType.IQ4_NL, 32, 18),
    _blocks(TensorType.IQ4_XS, 256, 136),
    _blocks(TensorType.TQ1_0, 256, 54),
    _blocks(TensorType.TQ2_0, 256, 66),
    _blocks(TensorType.MXFP4, 32, 17),
    _blocks(TensorType.NVFP4, 64, 36),
    # Sizes only: intermediate results (Q8_1, Q8_K), and types for which `gguf.quants` has no reference.
    QuantFormat(TensorType.Q8_1, 32, 36),
    QuantFormat(TensorType.Q8_K, 256, 292),
    QuantFormat(TensorType.Q1_0, 128, 18),
    QuantFormat(TensorType.Q2_0, 64, 18),
)

FORMATS: dict[int, QuantFormat] = {fmt.type: fmt for fmt in _FORMATS}
"""Every known format by its type id. A plugin adds its own before files that use it are opened."""


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
    """Bytes of a tensor of row-major `shape`; ModelFormatError when its rows are no whole number of blocks."""
    fmt = _format(tensor_type)
    width = shape[-1] if shape else 1
    if width % fmt.block_size:
        raise ModelFormatError(f"rows of {width} numbers are not a multiple of {fmt.name}'s block of {fmt.block_size}")
    return math.prod(shape) // fmt.block_size * fmt.type_size


def dequantize(raw: npt.NDArray[Any], tensor_type: int) -> Floats:
    """Dequantise uint8 [n_rows, row_bytes] to float32 [n_rows, n_columns], bit-equal to `gguf.quants`.

    The result of an F32 tensor is a view of `raw`. ModelFormatError when `row_bytes` is no whole number of blocks or
    when nothing is known about the type but its size.
    """
    fmt = _format(tensor_type)
    if fmt.dequantize is None:
        raise ModelFormatError(f"tensors of type {fmt.name} cannot be dequantised")
    if raw.ndim != 2 or raw.dtype != np.uint8:
        raise InvalidRequestError(f"expected uint8 [n_rows, row_bytes], not {raw.dtype} {list(raw.shape)}")
    if raw.shape[1] % fmt.type_size:
        raise ModelFormatError(f"rows of {raw.shape[1]} bytes are not a multiple of {fmt.name}'s {fmt.type_size}")
    if raw.size == 0:
        return np.empty((raw.shape[0], raw.shape[1] // fmt.type_size * fmt.block_size), np.float32)
    with np.errstate(all="ignore"):  # NaN and infinite scales pass through as they do in the reference
        return fmt.dequantize(raw)


def quantize(x: Floats, tensor_type: int) -> Bytes:
    """Quantise float32 [n_rows, n_columns] to uint8 [n_rows, row_bytes], bit-equal to `gguf.quants`.

    InvalidRequestError when the type has no quantiser; ModelFormatError when the rows are no whole number of blocks.
    """
    fmt = _format(tensor_type)
    if fmt.quantize is None:
        raise InvalidRequestError(f"cannot quantise to {fmt.name}")
    row_bytes = nbytes(tensor_type, x.shape[-1:])
    if x.size == 0:
        return np.empty((x.shape[0], row_bytes), np.uint8)
    with np.errstate(all="ignore"):
        return fmt.quantize(x)

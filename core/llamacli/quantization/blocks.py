"""Block formats for quantizing: representable numbers and byte layouts.

A block is some groups of numbers, and number = factor * scale * code - shift_factor * shift, with a code per number, a
scale and a shift per group, and the two factors per block. In formats of one group per block, scale and shift are
floats and there are no factors; in the others (K-quants) they are small integers.

Layouts are those that `gguf.quants` reads; all fields are little endian.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.quantization.tensor_types import Bytes, Floats, TensorType


@attrs.frozen
class Blocks:
    """Contents of some blocks, before packing.

    `codes`: uint8 [n_blocks, groups, size], 0 for the lowest code of the format. `scales` and `shifts`: float32
    [n_blocks, groups]. `factors` and `shift_factors`: float32 [n_blocks].
    """

    codes: npt.NDArray[np.uint8]
    scales: Floats
    shifts: Floats
    factors: Floats
    shift_factors: Floats


@attrs.frozen
class BlockFormat:
    """Code grid of a tensor type.

    A block has `groups` groups of `size` numbers, with codes from `low` to `high`. `scales` is the range of the integer
    scales, lowest and highest; shifts have the same highest value, from 0 on; None in a format of one group. `shifted`
    is true if there are shifts. `pack` returns the file's bytes, uint8 [n_blocks, type_size].
    """

    type: TensorType
    size: int
    groups: int
    low: int
    high: int
    scales: tuple[int, int] | None
    shifted: bool
    pack: Callable[[Blocks], Bytes]


def joined(values: npt.NDArray[Any], bits: int, axis: int) -> Bytes:
    """Pack values along an axis into single bytes, `bits` bits each.

    The first value has the lowest bits; the other axes are flattened into a row per block.
    """
    parts = np.moveaxis(values, axis, 0)
    packed = parts[0].copy()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << np.uint8(bits * i)
    return packed.reshape(len(values), -1)


def halves(values: Floats) -> Bytes:
    """Factors of blocks as float16 bytes, uint8 [n_blocks, 2]."""
    return np.ascontiguousarray(values, "<f2").reshape(len(values), 1).view(np.uint8)


def _integers(values: Floats) -> npt.NDArray[np.uint8]:
    """Small integers as bytes, negative ones in two's complement."""
    return values.astype(np.int8).view(np.uint8)


def _pack_q4_q5(b: Blocks, *, shifted: bool = False, has_fifth_bits: bool = False) -> Bytes:
    shifts = [halves(-b.shifts)] if shifted else []
    fifth_bits = [joined(b.codes.reshape(-1, 4, 8) >> 4, 1, axis=2)] if has_fifth_bits else []
    return np.hstack([halves(b.scales), *shifts, *fifth_bits, joined(b.codes.reshape(-1, 2, 16) & 15, 4, axis=1)])


def _pack_q8_0(b: Blocks) -> Bytes:
    return np.hstack([halves(b.scales), b.codes.reshape(-1, 32) - np.uint8(127)])


def _pack_q2_k(b: Blocks) -> Bytes:
    scales = _integers(b.scales) | _integers(b.shifts) << np.uint8(4)
    codes = joined(b.codes.reshape(-1, 2, 4, 32), 2, axis=2)
    return np.hstack([scales, codes, halves(b.factors), halves(b.shift_factors)])


def _pack_q3_k(b: Blocks) -> Bytes:
    scales = _integers(b.scales + 32)
    low = joined(scales.reshape(-1, 2, 8) & 15, 4, axis=1)
    high = joined(scales.reshape(-1, 4, 4) >> 4, 2, axis=1)
    third_bits = joined(b.codes.reshape(-1, 8, 32) >> 2, 1, axis=1)
    codes = joined(b.codes.reshape(-1, 2, 4, 32) & 3, 2, axis=2)
    return np.hstack([third_bits, codes, low, high, halves(b.factors)])


def _head_of_q4_k(b: Blocks) -> Bytes:
    """Header of Q4_K and Q5_K: factors, then eight 6-bit scales and shifts.

    The first four of each share bytes with the upper bits of the last four.
    """
    scales, shifts = _integers(b.scales), _integers(b.shifts)
    first = np.hstack([scales[:, :4] | scales[:, 4:] >> 4 << 6, shifts[:, :4] | shifts[:, 4:] >> 4 << 6])
    rest = scales[:, 4:] & 15 | shifts[:, 4:] << 4
    return np.hstack([halves(b.factors), halves(b.shift_factors), first, rest])


def _pack_q4_k(b: Blocks) -> Bytes:
    return np.hstack([_head_of_q4_k(b), joined(b.codes.reshape(-1, 4, 2, 32), 4, axis=2)])


def _pack_q5_k(b: Blocks) -> Bytes:
    fifth_bits = joined(b.codes >> 4, 1, axis=1)
    return np.hstack([_head_of_q4_k(b), fifth_bits, joined(b.codes.reshape(-1, 4, 2, 32) & 15, 4, axis=2)])


def _pack_q6_k(b: Blocks) -> Bytes:
    low = joined(b.codes.reshape(-1, 2, 2, 64) & 15, 4, axis=2)
    high = joined(b.codes.reshape(-1, 2, 4, 32) >> 4, 2, axis=2)
    return np.hstack([low, high, _integers(b.scales), halves(b.factors)])


_FORMATS = (
    BlockFormat(TensorType.Q4_0, 32, 1, -8, 7, None, False, _pack_q4_q5),
    BlockFormat(TensorType.Q4_1, 32, 1, 0, 15, None, True, partial(_pack_q4_q5, shifted=True)),
    BlockFormat(TensorType.Q5_0, 32, 1, -16, 15, None, False, partial(_pack_q4_q5, has_fifth_bits=True)),
    BlockFormat(TensorType.Q5_1, 32, 1, 0, 31, None, True, partial(_pack_q4_q5, shifted=True, has_fifth_bits=True)),
    BlockFormat(TensorType.Q8_0, 32, 1, -127, 127, None, False, _pack_q8_0),
    BlockFormat(TensorType.Q2_K, 16, 16, 0, 3, (0, 15), True, _pack_q2_k),
    BlockFormat(TensorType.Q3_K, 16, 16, -4, 3, (-32, 31), False, _pack_q3_k),
    BlockFormat(TensorType.Q4_K, 32, 8, 0, 15, (0, 63), True, _pack_q4_k),
    BlockFormat(TensorType.Q5_K, 32, 8, 0, 31, (0, 63), True, _pack_q5_k),
    BlockFormat(TensorType.Q6_K, 16, 16, -32, 31, (-128, 127), False, _pack_q6_k),
)

BLOCK_FORMATS = {fmt.type: fmt for fmt in _FORMATS}
"""The formats by their types."""

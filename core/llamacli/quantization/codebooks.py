"""Codebook formats for quantizing: IQ, TQ and FP4 types.

A group of numbers has one scale, and number = scale * sign * (level + shift). In the formats of single numbers, every
level is free for each; in those of vectors, 4 or 8 neighbouring numbers are an entry of a grid, which lists their
levels. The grids are those of `gguf.quants`, which reads the layouts too; all fields are little endian.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.quantization.blocks import halves, joined
from llamacli.quantization.tensor_types import IQ4_NL_VALUES, Bytes, Floats, TensorType


class Signs(IntEnum):
    """Signs: those of levels, free for each number, or even in eight."""

    LEVELS = 0
    FREE = 1
    EVEN = 2


@attrs.frozen(eq=False)
class CodebookBlocks:
    """Contents of some groups, before packing.

    `codes`: uint16 [n_groups, n_vectors], the grid's entry or the level. `shifts`: uint8 [n_groups, n_vectors], the
    index of the shift. `signs`: uint8 [n_groups, size / 8], bit i for the i-th of eight numbers, 1 for minus. `scales`:
    float32 [n_groups], and `factors`: float32 [n_blocks].
    """

    codes: npt.NDArray[np.uint16]
    shifts: Bytes
    signs: Bytes
    scales: Floats
    factors: Floats


@attrs.frozen(eq=False)
class Multipliers:
    """Integers that scale the groups of a block.

    They are `first`, `first + step`, ..., `count` of them. A group's scale is unit * factor * integer, and the factor
    is float16. `stretches` are the shares of the integers' range that a search gives to the largest scale of a block.
    """

    first: int
    step: int
    count: int
    unit: float = 1.0
    stretches: tuple[float, ...] = (0.9, 0.95, 1.0, 1.05)


@attrs.frozen(eq=False)
class Codebook:
    """Format of a tensor type with a codebook.

    A block has `groups` groups of `size` numbers. `levels` are float32, ascending. `grid` is int [n_entries, dim], of
    indices of levels; None where every number has a level of its own. `shifts` are the values of the shift, which
    `shift_span` numbers have in common. Scales are those of `multipliers`, one of the `scales` (float32, ascending), or
    any float16 where both are None. `tries` are the first quotient, the ratio and the number of a search: quotients of
    a group's largest number and its largest representable one. `pack` returns the file's bytes,
    uint8 [n_blocks, type_size].
    """

    type: TensorType
    size: int
    levels: Floats
    tries: tuple[float, float, int]
    pack: Callable[[CodebookBlocks], Bytes]
    groups: int = 1
    grid: npt.NDArray[np.int64] | None = None
    signs: Signs = Signs.LEVELS
    shifts: tuple[float, ...] = (0.0,)
    shift_span: int = 8
    multipliers: Multipliers | None = None
    scales: Floats | None = None

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return 1 if self.grid is None else self.grid.shape[1]

    @property
    def largest(self) -> float:
        """Largest number that it can represent."""
        level = float(np.abs(self.levels).max() + max(self.shifts))
        if self.scales is not None:
            return level * float(self.scales[-1])
        return 65504.0 * level


# --- layouts ---------------------------------------------------------------------------------------------------------


def _nibbles(values: npt.NDArray[np.uint8]) -> Bytes:
    """Pairs of 4-bit values, the first one in the lower bits."""
    return joined(values.reshape(len(values), -1, 2), 4, axis=2)


def _half_blocks(codes: npt.NDArray[np.uint8], size: int) -> Bytes:
    """4-bit codes of groups, the first half in the lower bits."""
    return joined(codes.reshape(len(codes), -1, 2, size // 2), 4, axis=2)


def _bytes_of(words: npt.NDArray[np.unsignedinteger], dtype: str) -> Bytes:
    return np.ascontiguousarray(words, dtype).view(np.uint8).reshape(len(words), -1)


def _by_block(b: CodebookBlocks, groups: int) -> tuple[npt.NDArray[np.uint16], Bytes, Floats]:
    n = len(b.scales) // groups
    return b.codes.reshape(n, -1), b.signs.reshape(n, -1), b.scales.reshape(n, groups)


def _odd(scales: Floats) -> npt.NDArray[np.uint8]:
    return ((scales - 1) / 2).astype(np.uint8)


def _pack_iq4_nl(b: CodebookBlocks) -> Bytes:
    return np.hstack([halves(b.scales), _half_blocks(b.codes.astype(np.uint8), 32)])


def _pack_iq4_xs(b: CodebookBlocks) -> Bytes:
    codes, _, scales = _by_block(b, 8)
    integers = (scales + 32).astype(np.uint8)
    upper = np.bitwise_or.reduce((integers >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    lower = _nibbles(integers & np.uint8(15))
    return np.hstack([halves(b.factors), _bytes_of(upper, "<u2"), lower, _half_blocks(codes.astype(np.uint8), 32)])


_POWERS = np.array([81, 27, 9, 3, 1], np.uint8)


def _trits(codes: npt.NDArray[np.uint8], per_byte: int, run: int) -> Bytes:
    """Ternary digits as fixed-point fractions of 256, `run` digits apart."""
    digits = codes.reshape(len(codes), -1, per_byte, run) * _POWERS[:per_byte, None]
    whole = digits.sum(axis=2, dtype=np.uint16).reshape(len(codes), -1)
    return ((whole * np.uint32(256) + 242) // 243).astype(np.uint8)


def _pack_tq1_0(b: CodebookBlocks) -> Bytes:
    codes = b.codes.astype(np.uint8)
    parts = _trits(codes[:, :160], 5, 32), _trits(codes[:, 160:240], 5, 16), _trits(codes[:, 240:], 4, 4)
    return np.hstack([*parts, halves(b.scales)])


def _pack_tq2_0(b: CodebookBlocks) -> Bytes:
    codes = joined(b.codes.astype(np.uint8).reshape(-1, 2, 4, 32), 2, axis=2)
    return np.hstack([codes, halves(b.scales)])


_FP4_CODES = np.array([15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7], np.uint8)
"""FP4 (E2M1) codes of the levels in ascending order."""


def _pack_mxfp4(b: CodebookBlocks) -> Bytes:
    exponents = np.searchsorted(_MX_SCALES, b.scales).astype(np.uint8)
    return np.hstack([exponents[:, None], _half_blocks(_FP4_CODES[b.codes], 32)])


def _pack_nvfp4(b: CodebookBlocks) -> Bytes:
    scales = np.searchsorted(_NV_SCALES, b.scales).astype(np.uint8)
    return np.hstack([scales.reshape(-1, 4), _half_blocks(_FP4_CODES[b.codes.reshape(-1, 64)], 16)])


def _sign_words(signs: Bytes, scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Words of signs, four times 7 bits, and a 4-bit scale."""
    words = scales.astype(np.uint32) << np.uint32(28)
    for i, byte in enumerate(np.moveaxis(signs.reshape(*scales.shape, 4), 2, 0)):
        words |= (byte & np.uint8(127)).astype(np.uint32) << np.uint32(7 * i)
    return words


def _pack_iq3_xxs(b: CodebookBlocks) -> Bytes:
    codes, signs, scales = _by_block(b, 8)
    return np.hstack([halves(b.factors), codes.astype(np.uint8), _bytes_of(_sign_words(signs, _odd(scales)), "<u4")])


def _pack_iq3_s(b: CodebookBlocks) -> Bytes:
    codes, signs, scales = _by_block(b, 8)
    upper = joined((codes >> 8).astype(np.uint8).reshape(len(codes), -1, 8), 1, axis=2)
    return np.hstack([halves(b.factors), (codes & 255).astype(np.uint8), upper, signs, _nibbles(_odd(scales))])


def _pack_iq2_xxs(b: CodebookBlocks) -> Bytes:
    codes, signs, scales = _by_block(b, 8)
    words = _bytes_of(_sign_words(signs, _odd(scales)), "<u4").reshape(len(codes), 8, 4)
    pairs = np.concatenate([codes.astype(np.uint8).reshape(len(codes), 8, 4), words], axis=2)
    return np.hstack([halves(b.factors), pairs.reshape(len(codes), -1)])


def _pack_iq2_xs(b: CodebookBlocks) -> Bytes:
    codes, signs, scales = _by_block(b, 16)
    words = codes | (signs & np.uint8(127)).astype(np.uint16) << np.uint16(9)
    return np.hstack([halves(b.factors), _bytes_of(words, "<u2"), _nibbles(_odd(scales))])


def _pack_iq2_s(b: CodebookBlocks) -> Bytes:
    codes, signs, scales = _by_block(b, 16)
    upper = joined((codes >> 8).astype(np.uint8).reshape(len(codes), -1, 4), 2, axis=2)
    return np.hstack([halves(b.factors), (codes & 255).astype(np.uint8), signs, upper, _nibbles(_odd(scales))])


def _pack_iq1_s(b: CodebookBlocks) -> Bytes:
    codes, _, scales = _by_block(b, 8)
    shifts = b.shifts.reshape(len(codes), 8, 4)[:, :, 0].astype(np.uint16)
    words = _odd(scales).astype(np.uint16) << np.uint16(12) | shifts << np.uint16(15)
    for i, upper in enumerate(np.moveaxis((codes >> 8).reshape(len(codes), 8, 4), 2, 0)):
        words |= upper << np.uint16(3 * i)
    return np.hstack([halves(b.factors), (codes & 255).astype(np.uint8), _bytes_of(words, "<u2")])


def _pack_iq1_m(b: CodebookBlocks) -> Bytes:
    codes, _, scales = _by_block(b, 16)
    shifts = b.shifts.reshape(len(codes), -1)
    upper = _nibbles((codes >> 8).astype(np.uint8) | shifts << np.uint8(3))
    factor = np.ascontiguousarray(b.factors, "<f2").view("<u2")[:, None]
    words = (factor >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)) << np.uint16(12)
    for i, scale in enumerate(np.moveaxis(_odd(scales).reshape(-1, 4, 4), 2, 0)):
        words |= scale.astype(np.uint16) << np.uint16(3 * i)
    return np.hstack([(codes & 255).astype(np.uint8), upper, _bytes_of(words, "<u2")])


# --- formats ---------------------------------------------------------------------------------------------------------

_MX_SCALES = np.ldexp(np.float32(1), np.arange(255) - 128).astype(np.float32)
"""Scales of MXFP4, E8M0 halved, by their bytes without NaN."""


def _nv_scales() -> Floats:
    codes = np.arange(127)
    exponents, fractions = codes >> 3, codes & 7
    normal = np.ldexp(8.0 + fractions, exponents - 11)
    return np.where(exponents == 0, np.ldexp(1.0 * fractions, -10), normal).astype(np.float32)


_NV_SCALES = _nv_scales()
"""Scales of NVFP4, unsigned E4M3 halved, by their bytes without NaN."""

_FP4_LEVELS = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_TERNARY = np.array([-1, 0, 1], np.float32)
_IQ4_LEVELS = np.array(IQ4_NL_VALUES, np.float32)
_IQ4_TRIES, _TERNARY_TRIES = (0.8, 1.04, 13), (1.0, 1.15, 16)
_IQ3_TRIES, _IQ2_TRIES, _IQ1_TRIES = (0.8, 1.06, 9), (0.8, 1.1, 9), (0.85, 1.27, 6)
_IQ1_MULTIPLIERS = Multipliers(1, 2, 8, stretches=(0.9, 1.0))
"""Fewer stretches than by default: the search of two times 2048 entries is slow, and more hardly help."""

_SCALARS = (
    Codebook(TensorType.IQ4_NL, 32, _IQ4_LEVELS, _IQ4_TRIES, _pack_iq4_nl),
    Codebook(
        TensorType.IQ4_XS, 32, _IQ4_LEVELS, _IQ4_TRIES, _pack_iq4_xs, groups=8, multipliers=Multipliers(-32, 1, 64)
    ),
    Codebook(TensorType.TQ1_0, 256, _TERNARY, _TERNARY_TRIES, _pack_tq1_0),
    Codebook(TensorType.TQ2_0, 256, _TERNARY, _TERNARY_TRIES, _pack_tq2_0),
    Codebook(TensorType.MXFP4, 32, _FP4_LEVELS, (0.7, 1.4, 3), _pack_mxfp4, scales=_MX_SCALES),
    Codebook(TensorType.NVFP4, 16, _FP4_LEVELS, (0.7, 1.12, 7), _pack_nvfp4, scales=_NV_SCALES),
)
"""Formats of single numbers."""

_Grid = tuple[int, Signs, Multipliers, tuple[float, float, int], Callable[[CodebookBlocks], Bytes]]
_GRIDS: dict[TensorType, _Grid] = {
    TensorType.IQ3_XXS: (32, Signs.EVEN, Multipliers(1, 2, 16, 0.25), _IQ3_TRIES, _pack_iq3_xxs),
    TensorType.IQ3_S: (32, Signs.FREE, Multipliers(1, 2, 16), _IQ3_TRIES, _pack_iq3_s),
    TensorType.IQ2_XXS: (32, Signs.EVEN, Multipliers(1, 2, 16, 0.125), _IQ2_TRIES, _pack_iq2_xxs),
    TensorType.IQ2_XS: (16, Signs.EVEN, Multipliers(1, 2, 16, 0.125), _IQ2_TRIES, _pack_iq2_xs),
    TensorType.IQ2_S: (16, Signs.FREE, Multipliers(1, 2, 16, 0.125), _IQ2_TRIES, _pack_iq2_s),
    TensorType.IQ1_S: (32, Signs.LEVELS, _IQ1_MULTIPLIERS, _IQ1_TRIES, _pack_iq1_s),
    TensorType.IQ1_M: (16, Signs.LEVELS, _IQ1_MULTIPLIERS, _IQ1_TRIES, _pack_iq1_m),
}
"""Formats of vectors, with the grids of `gguf.quants`."""

_SHIFT_SPANS = {TensorType.IQ1_S: 32, TensorType.IQ1_M: 8}
"""Numbers with one shift, of an eighth up or down."""

CODEBOOK_TYPES = (*(book.type for book in _SCALARS), *_GRIDS)
"""Types with a codebook."""


@functools.cache
def codebook(kind: IntEnum) -> Codebook:
    """Codebook of a type. Raises KeyError for other types."""
    kind = TensorType(kind)
    scalars = {book.type: book for book in _SCALARS}
    if kind in scalars:
        return scalars[kind]
    size, signs, multipliers, tries, pack = _GRIDS[kind]
    from gguf import quants

    source = getattr(quants, kind.name)
    source.init_grid()
    levels = np.sort(np.array(source.grid_map, np.float32))
    grid = np.searchsorted(levels, source.grid.reshape(source.grid_shape))
    shifts = (0.125, -0.125) if kind in _SHIFT_SPANS else (0.0,)
    return Codebook(
        kind, size, levels, tries, pack, 256 // size, grid, signs, shifts, _SHIFT_SPANS.get(kind, 8), multipliers
    )

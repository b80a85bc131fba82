"""GGML formats of few bits: IQ1, IQ2, IQ3, TQ, Q1_0 and Q2_0.

Files store numbers of IQ types as indices into a table of vectors, the grid. Looking these up would take a gather for
each 4 columns, so a packed matrix has a code for each number instead: its level among the few of the grid, and its
sign. That takes more memory than the file: see docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels import ir
from llamacli.kernels.deferred import njit
from llamacli.kernels.ggml_packings import bit_pair, integer_format, load_int, load_nibbles, u16
from llamacli.kernels.packing_formats import Bytes, FieldKind
from llamacli.quantization import TensorType

# --- kinds of scales -------------------------------------------------------------------------------------------------


def _odd_pair(unit: float) -> FieldKind:
    """Two nibbles n of a byte, as (2n + 1) * unit."""

    def load(b: ir.Builder, address: ir.Value) -> tuple[ir.Value, ...]:
        double, single = (ir.constant(ir.F32X16, factor * unit) for factor in (2, 1))
        return tuple(ir.fma(b, ir.to_f32(b, nibble), double, single) for nibble in load_nibbles(b, address))

    return FieldKind(np.uint8, load)


def _load_scale_and_delta(b: ir.Builder, nibble: ir.Value) -> tuple[ir.Value, ir.Value]:
    n = b.and_(nibble, ir.constant(ir.I32X16, 7))
    scale = ir.to_f32(b, b.or_(b.shl(n, ir.constant(ir.I32X16, 1)), ir.constant(ir.I32X16, 1)))
    eighth = b.bitcast(b.fmul(scale, ir.constant(ir.F32X16, 0.125)), ir.I32X16)
    sign = b.shl(b.lshr(nibble, ir.constant(ir.I32X16, 3)), ir.constant(ir.I32X16, 31))
    return scale, b.bitcast(b.or_(eighth, sign), ir.F32X16)


def _load_bits(b: ir.Builder, address: ir.Value) -> tuple[ir.Value, ...]:
    byte, zero = load_int(b, address, signed=False), ir.constant(ir.I32X16, 0)
    return tuple(b.icmp_unsigned("!=", b.and_(byte, ir.constant(ir.I32X16, 1 << bit)), zero) for bit in range(8))


ODD_PAIR, ODD_PAIR_4TH, ODD_PAIR_8TH = _odd_pair(1), _odd_pair(1 / 4), _odd_pair(1 / 8)

SCALE_DELTA_PAIR = FieldKind(
    np.uint8,
    lambda b, address: tuple(_load_scale_and_delta(b, nibble) for nibble in load_nibbles(b, address)),
)
"""Two nibbles of a byte: a scale 2n + 1 of 3 bits, and a shift by an eighth of it, down where the fourth bit is set."""

BITS = FieldKind(np.uint8, _load_bits)
"""The bits of a byte, lowest first."""

# --- formulas --------------------------------------------------------------------------------------------------------


def _paired(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["scale"][group // 2][group % 2], None)]


def _of_halves(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(scale, None) for scale in f["scale"][group]]


# --- decoding --------------------------------------------------------------------------------------------------------


def _grid(name: str) -> Callable[[], Bytes]:
    """Maker of a grid as levels, uint8 [n, 8] or [n, 4].

    A level is an index into the few numbers that the grid has.
    """

    def levels() -> Bytes:
        from gguf import quants

        kind = getattr(quants, name)
        kind.init_grid()
        return np.searchsorted(kind.grid_map, kind.grid[0, 0]).astype(np.uint8)

    return levels


@njit(inline="always")
def _even_signs(bits: Any) -> Any:
    """Complete 7 signs to 8 of which an even number is set."""
    parity = bits ^ bits >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return bits | (parity & 1) << 7


@njit(inline="always")
def _signed(levels: Any, signs: Any, first: Any, sign_bit: Any, codes: Any) -> None:
    """Write codes of levels from `first` on, with `signs` of 8 codes."""
    for i in range(len(levels)):
        codes[first + i] = levels[i] | (signs >> (first % 8 + i) & 1) << sign_bit


@njit(inline="always")
def _word(block: Any, at: Any) -> Any:
    return np.uint32(u16(block, at)) | np.uint32(u16(block, at + 2)) << 16


@njit(inline="always")
def _put_nibble(fields: Any, first: Any, i: Any, nibble: Any) -> None:
    """Store nibble i of bytes from field `first` on, lower ones first."""
    if i % 2 == 0:
        fields[first + i // 2] = nibble
    else:
        fields[first + i // 2] |= nibble << 4


def _signed_table(*levels: int, bias: int) -> tuple[int, ...]:
    return tuple(bias + sign * level for sign in (1, -1) for level in levels)


_IQ2: dict[str, Any] = {"planes": (2, 1), "bias_bits": 6, "table": _signed_table(8, 25, 43, 0, bias=64) + (64,) * 8}


@integer_format(
    TensorType.IQ2_XXS, fields={"scale": (ODD_PAIR_8TH, 4)}, terms=_paired, decode_table=_grid("IQ2_XXS"), **_IQ2
)
def iq2_xxs(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, then 4 indices and a word a group.

    The word holds four times 7 signs, and a scale.
    """
    fields[0] = u16(block, 0)
    for group in range(8):
        at = 2 + 8 * group
        word = _word(block, at + 4)
        for i in range(4):
            _signed(grid[block[at + i]], _even_signs(word >> 7 * i & 127), 32 * group + 8 * i, 2, codes)
        _put_nibble(fields, 1, group, word >> 28)


@integer_format(
    TensorType.IQ2_XS, fields={"scale": (ODD_PAIR_8TH, 8)}, terms=_of_halves, decode_table=_grid("IQ2_XS"), **_IQ2
)
def iq2_xs(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, indices of 9 bits with 7 signs, 16 scales."""
    fields[0] = u16(block, 0)
    for i in range(32):
        index = u16(block, 2 + 2 * i)
        _signed(grid[index & 511], _even_signs(index >> 9), 8 * i, 2, codes)
    for group in range(8):
        fields[1 + group] = block[66 + group]


@integer_format(
    TensorType.IQ2_S, fields={"scale": (ODD_PAIR_8TH, 8)}, terms=_of_halves, decode_table=_grid("IQ2_S"), **_IQ2
)
def iq2_s(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, low bytes of indices, signs, upper bits, 16 scales."""
    fields[0] = u16(block, 0)
    for i in range(32):
        upper = np.uint32(block[66 + i // 4]) >> 2 * (i % 4) & 3
        _signed(grid[block[2 + i] | upper << 8], block[34 + i], 8 * i, 2, codes)
    for group in range(8):
        fields[1 + group] = block[74 + group]


@integer_format(
    TensorType.IQ3_XXS, planes=(4,), fields={"scale": (ODD_PAIR_4TH, 4)}, terms=_paired, bias_bits=6,
    table=_signed_table(4, 12, 20, 28, 36, 44, 52, 62, bias=64), decode_table=_grid("IQ3_XXS"),
)  # fmt: skip
def iq3_xxs(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, indices, a word of signs and scale a group."""
    fields[0] = u16(block, 0)
    for group in range(8):
        word = _word(block, 66 + 4 * group)
        for i in range(8):
            signs = _even_signs(word >> 7 * (i // 2) & 127)
            _signed(grid[block[2 + 8 * group + i]], signs, 32 * group + 4 * i, 3, codes)
        _put_nibble(fields, 1, group, word >> 28)


@integer_format(
    TensorType.IQ3_S, planes=(4,), fields={"scale": (ODD_PAIR, 4)}, terms=_paired, bias_bits=4,
    table=_signed_table(1, 3, 5, 7, 9, 11, 13, 15, bias=16), decode_table=_grid("IQ3_S"),
)  # fmt: skip
def iq3_s(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, low bytes of indices, their ninth bits, signs, scales."""
    fields[0] = u16(block, 0)
    for i in range(64):
        ninth = np.uint32(block[66 + i // 8]) >> i % 8 & 1
        _signed(grid[block[2 + i] | ninth << 8], block[74 + i // 2], 4 * i, 3, codes)
    for pair in range(4):
        fields[1 + pair] = block[106 + pair]


@integer_format(
    TensorType.IQ1_S, planes=(2,), fields={"scale_delta": (SCALE_DELTA_PAIR, 4)},
    terms=lambda f, group: [f["scale_delta"][group // 2][group % 2]], bias_bits=0, decode_table=_grid("IQ1_S"),
)  # fmt: skip
def iq1_s(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: d, low bytes of indices, a word a group.

    The word holds the upper 3 bits of four indices, the scale, and the sign of the delta.
    """
    fields[0] = u16(block, 0)
    for group in range(8):
        upper = np.uint32(u16(block, 34 + 2 * group))
        for i in range(4):
            levels = grid[block[2 + 4 * group + i] | (upper >> 3 * i & 7) << 8]
            for j in range(8):
                codes[32 * group + 8 * i + j] = levels[j]
        _put_nibble(fields, 1, group, upper >> 12)


@integer_format(
    TensorType.IQ1_M, planes=(2,), fields={"scale": (ODD_PAIR_8TH, 8), "delta": (BITS, 4)}, terms=_of_halves,
    bias_bits=4, code_shift=3, marks=lambda f, group: f["delta"][group // 2][4 * (group % 2) : 4 * (group % 2) + 4],
    mark_offsets=(9, 7), decode_table=_grid("IQ1_M"),
)  # fmt: skip
def iq1_m(block: Any, codes: Any, fields: Any, grid: Any) -> None:
    """Block layout: low bytes of indices, upper bits, scales with d.

    The upper 3 bits of an index and the sign of its delta are a nibble. Each of four 16-bit words has 4 scales of
    3 bits, and 4 bits of d. Codes count eighths: 8 * (level - 1) and a delta of 1 or -1.
    """
    d = np.uint32(0)
    for i in range(4):
        word = np.uint32(u16(block, 48 + 2 * i))
        d |= word >> 12 << 4 * i
        for j in range(4):
            _put_nibble(fields, 1, 4 * i + j, word >> 3 * j & 7)
        fields[9 + i] = 0
    fields[0] = d
    for i in range(32):
        upper = np.uint32(block[32 + i // 2]) >> 4 * (i % 2) & 15
        levels = grid[block[i] | (upper & 7) << 8]
        for j in range(8):
            codes[8 * i + j] = levels[j]
        fields[9 + i // 8] |= upper >> 3 << i % 8


_POWERS = (1, 3, 9, 27, 81)


@njit(inline="always")
def _trit(byte: Any, digit: Any) -> Any:
    """Digit of a byte that holds five digits of base 3.

    The byte is a fraction of 256, its first digit the highest.
    """
    return (np.uint32(byte) * np.uint32(_POWERS[digit]) & 255) * 3 >> 8


@integer_format(TensorType.TQ1_0, planes=(2,), bias_bits=0)
def tq1_0(block: Any, codes: Any, fields: Any) -> None:
    """Block layout: 160 digits, 80 digits, 16 digits, d.

    They take 32, 16 and 4 bytes; digits of a place lie together.
    """
    for digit in range(5):
        for i in range(32):
            codes[32 * digit + i] = _trit(block[i], digit)
        for i in range(16):
            codes[160 + 16 * digit + i] = _trit(block[32 + i], digit)
    for digit in range(4):
        for i in range(4):
            codes[240 + 4 * digit + i] = _trit(block[48 + i], digit)
    fields[0] = u16(block, 52)


@integer_format(TensorType.TQ2_0, planes=(2,), bias_bits=0)
def tq2_0(block: Any, codes: Any, fields: Any) -> None:
    """Block layout: bit pairs, d."""
    for group in range(8):
        for i in range(32):
            codes[32 * group + i] = bit_pair(block, group, i)
    fields[0] = u16(block, 64)


@integer_format(TensorType.Q1_0, planes=(1,), bias_bits=0, code_shift=1)
def q1_0(block: Any, codes: Any, fields: Any) -> None:
    """Block layout: d, bits."""
    for i in range(128):
        codes[i] = block[2 + i // 8] >> (i % 8) & 1
    fields[0] = u16(block, 0)


@integer_format(TensorType.Q2_0, planes=(2,), bias_bits=0)
def q2_0(block: Any, codes: Any, fields: Any) -> None:
    """Block layout: d, bit pairs."""
    for i in range(64):
        codes[i] = block[2 + i // 4] >> (2 * (i % 4)) & 3
    fields[0] = u16(block, 0)

"""GGML integer formats: decoders and formulas of their blocks.

Layouts as in GGML's `block_q*` structures. A decoder reads one block of a row: it writes the block's codes, a byte
each, and the bits of the fields that stand beside them in the order in which the format lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.kernels import ir
from llamacli.kernels.deferred import njit
from llamacli.kernels.packing_formats import INTEGER_PACKINGS, Bytes, Decode, FieldKind, IntegerPacking
from llamacli.quantization import TensorType, block_size, type_size
from llamacli.quantization.tensor_types import IQ4_NL_VALUES

Fields = npt.NDArray[np.uint32]

_SIGN = np.uint16(0x8000)
"""Sign bit of float16: values that GGML subtracts are stored negated, so that they can be added."""

# --- kinds of scales -------------------------------------------------------------------------------------------------


def load_int(b: ir.Builder, address: ir.Value, signed: bool) -> ir.Value:
    """Load 16 bytes as int32."""
    stored = ir.load(b, address, ir.I8X16)
    return b.sext(stored, ir.I32X16) if signed else b.zext(stored, ir.I32X16)


def _load_e8m0(b: ir.Builder, address: ir.Value) -> ir.Value:
    """E8M0 scale, half of 2^(e - 127): bits of a float, two subnormal."""
    e = load_int(b, address, signed=False)
    small = b.shl(ir.constant(ir.I32X16, 0x00200000), e)
    normal = b.shl(b.sub(e, ir.constant(ir.I32X16, 1)), ir.constant(ir.I32X16, 23))
    bits = b.select(b.icmp_unsigned("<", e, ir.constant(ir.I32X16, 2)), small, normal)
    return b.bitcast(bits, ir.F32X16)


def load_nibbles(b: ir.Builder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Load the low and the high nibbles of 16 bytes as int32."""
    both = load_int(b, address, signed=False)
    return b.and_(both, ir.constant(ir.I32X16, 15)), b.lshr(both, ir.constant(ir.I32X16, 4))


def _load_e4m3(b: ir.Builder, address: ir.Value) -> ir.Value:
    """Half of an unsigned E4M3 number: a float16 of another exponent bias."""
    words = ir.ir.VectorType(ir.I16, ir.LANES)
    bits = b.shl(b.zext(ir.load(b, address, ir.I8X16), words), ir.constant(words, 7))
    half = b.bitcast(bits, ir.ir.VectorType(ir.HALF, ir.LANES))
    return b.fmul(b.fpext(half, ir.F32X16), ir.constant(ir.F32X16, 128))


F32 = FieldKind(np.float32, lambda b, address: ir.load(b, address, ir.F32X16), exponent=0x7F800000)
"""Field of float32 numbers."""
F16 = FieldKind(np.float16, ir.load_f16, exponent=0x7C00)
"""Field of float16 numbers."""
U8 = FieldKind(np.uint8, lambda b, address: ir.to_f32(b, load_int(b, address, signed=False)))
"""Field of unsigned bytes."""
I8 = FieldKind(np.int8, lambda b, address: ir.to_f32(b, load_int(b, address, signed=True)))
"""Field of signed bytes."""
E8M0_HALF = FieldKind(np.uint8, _load_e8m0)
E4M3_HALF = FieldKind(np.uint8, _load_e4m3)
U4_PAIR = FieldKind(np.uint8, lambda b, address: tuple(ir.to_f32(b, nibble) for nibble in load_nibbles(b, address)))

# --- formulas --------------------------------------------------------------------------------------------------------


def integer_format(kind: TensorType, **description: Any) -> Callable[[Decode], Decode]:
    """Decorate the decoder of an integer format.

    The description is that of IntegerPacking, with the sizes of the tensor type. Without `factors` there is one, and
    its field d, float16 unless given, comes first; without `terms` groups have no scales.
    """
    if "factors" not in description:
        description["factors"] = lambda f: (f["d"][0], None)
        description["fields"] = {"d": (F16, 1)} | description.get("fields", {})
    description |= {"file_bytes": type_size(kind), "groups": block_size(kind) // 32, "name": kind.name}
    description.setdefault("terms", lambda f, group: [(None, None)])

    def register(decode: Decode) -> Decode:
        INTEGER_PACKINGS[kind] = IntegerPacking(decode=decode, **description)
        return decode

    return register


def _d_and_m(f: dict[str, Any]) -> tuple[Any, Any]:
    return f["d"][0], f["m"][0]


def _d_and_min(f: dict[str, Any]) -> tuple[Any, Any]:
    return f["d"][0], f["minus_dmin"][0]


def _scales_and_minima(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["scale"][group], f["min"][group])]


def _half_scales(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["scale"][2 * group + half], None) for half in (0, 1)]


# --- decoding --------------------------------------------------------------------------------------------------------


@njit(inline="always")
def u16(block: Any, at: Any) -> Any:
    """Read 16 bits from a byte position."""
    return np.uint16(block[at]) | np.uint16(block[at + 1]) << 8


@njit(inline="always")
def _nibbles(packed: Any, codes: Any) -> None:
    """Unpack 16 bytes to 32 codes: low nibbles, then high ones."""
    for i in range(16):
        codes[i] = packed[i] & 15
        codes[i + 16] = packed[i] >> 4


@njit(inline="always")
def _nibbles_and_bits(packed: Any, bits: Any, codes: Any) -> None:
    """Unpack nibbles, and 4 bytes of fifth bits, to 32 codes."""
    _nibbles(packed, codes)
    for i in range(32):
        codes[i] |= (bits[i // 8] >> (i % 8) & 1) << 4


@njit(inline="always")
def _nibble_groups(packed: Any, codes: Any) -> None:
    """Unpack 128 bytes to 256 codes; of 32, low nibbles come first."""
    for chunk in range(4):
        for i in range(32):
            byte = packed[32 * chunk + i]
            codes[64 * chunk + i] = byte & 15
            codes[64 * chunk + 32 + i] = byte >> 4


@njit(inline="always")
def bit_pair(packed: Any, group: Any, i: Any) -> Any:
    """Code i of a group of 32 codes of 2 bits.

    Each 32 bytes hold four groups, lowest bits first.
    """
    return packed[group // 4 * 32 + i] >> (2 * (group % 4)) & 3


@njit(inline="always")
def _scales_and_mins(packed: Any, fields: Any) -> None:
    """Unpack 12 bytes to 8 scales and 8 minima of 6 bits."""
    for i in range(4):
        fields[i] = packed[i] & 63
        fields[8 + i] = packed[4 + i] & 63
        fields[4 + i] = packed[8 + i] & 15 | packed[i] >> 6 << 4
        fields[12 + i] = packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4


@integer_format(TensorType.Q8_0, planes=(8,), bias_bits=7)
def q8_0(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, int8 codes, biased by flipping their sign bits."""
    for i in range(32):
        codes[i] = block[2 + i] ^ 0x80
    fields[0] = u16(block, 0)


_IQ4_TABLE = tuple(value + 128 for value in IQ4_NL_VALUES)


@integer_format(TensorType.IQ4_NL, planes=(4,), bias_bits=7, table=_IQ4_TABLE)
@integer_format(TensorType.Q4_0, planes=(4,), bias_bits=3)
def q4_0(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, nibbles."""
    _nibbles(block[2:], codes)
    fields[0] = u16(block, 0)


@integer_format(TensorType.Q4_1, planes=(4,), fields={"d": (F16, 1), "m": (F16, 1)}, factors=_d_and_m)
def q4_1(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, m, nibbles."""
    _nibbles(block[4:], codes)
    fields[0], fields[1] = u16(block, 0), u16(block, 2)


@integer_format(TensorType.Q5_0, planes=(4, 1), bias_bits=4)
def q5_0(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, fifth bits, nibbles."""
    _nibbles_and_bits(block[6:], block[2:], codes)
    fields[0] = u16(block, 0)


@integer_format(TensorType.Q5_1, planes=(4, 1), fields={"d": (F16, 1), "m": (F16, 1)}, factors=_d_and_m)
def q5_1(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, m, fifth bits, nibbles."""
    _nibbles_and_bits(block[8:], block[4:], codes)
    fields[0], fields[1] = u16(block, 0), u16(block, 2)


@integer_format(
    TensorType.Q2_K, planes=(2,), fields={"d": (F16, 1), "minus_dmin": (F16, 1), "scale_min": (U4_PAIR, 16)},
    factors=_d_and_min, terms=lambda f, group: [f["scale_min"][2 * group + half] for half in (0, 1)],
)  # fmt: skip
def q2_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: 16 scales and minima, bit pairs, d, dmin."""
    for group in range(8):
        for i in range(32):
            codes[32 * group + i] = bit_pair(block[16:], group, i)
    fields[0], fields[1] = u16(block, 80), u16(block, 82) ^ _SIGN
    for i in range(16):
        fields[2 + i] = block[i]


@integer_format(TensorType.Q3_K, planes=(2, 1), fields={"scale": (I8, 16)}, terms=_half_scales, bias_bits=2)
def q3_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: third bits, bit pairs, scales, d.

    16 scales of 6 bits: 8 bytes of nibbles, 4 bytes of bit pairs.
    """
    for group in range(8):
        for i in range(32):
            codes[32 * group + i] = bit_pair(block[32:], group, i) | (block[i] >> group & 1) << 2
    fields[0] = u16(block, 108)
    for i in range(16):
        low = block[96 + i % 8] >> (4 * (i // 8)) & 15
        high = block[104 + i % 4] >> (2 * (i // 4)) & 3
        fields[1 + i] = np.uint8((low | high << 4) - 32)


_K_FIELDS = {"d": (F16, 1), "minus_dmin": (F16, 1), "scale": (U8, 8), "min": (U8, 8)}


@integer_format(TensorType.Q4_K, planes=(4,), fields=_K_FIELDS, factors=_d_and_min, terms=_scales_and_minima)
def q4_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, dmin, scales and minima, nibbles."""
    _nibble_groups(block[16:], codes)
    fields[0], fields[1] = u16(block, 0), u16(block, 2) ^ _SIGN
    _scales_and_mins(block[4:], fields[2:])


@integer_format(TensorType.Q5_K, planes=(4, 1), fields=_K_FIELDS, factors=_d_and_min, terms=_scales_and_minima)
def q5_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, dmin, scales and minima, fifth bits, nibbles.

    Bit g of each byte of fifth bits is for group g.
    """
    for group in range(8):
        for i in range(32):
            low = block[48 + 32 * (group // 2) + i] >> (4 * (group % 2)) & 15
            codes[32 * group + i] = low | (block[16 + i] >> group & 1) << 4
    fields[0], fields[1] = u16(block, 0), u16(block, 2) ^ _SIGN
    _scales_and_mins(block[4:], fields[2:])


@integer_format(TensorType.Q6_K, planes=(4, 2), fields={"scale": (I8, 16)}, terms=_half_scales, bias_bits=5)
def q6_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: nibbles, upper bit pairs, 16 scales, d.

    64 bytes of nibbles for four groups: two of low ones, two of high ones.
    """
    for group in range(8):
        half, quarter = group // 4, group % 4
        for i in range(32):
            low = block[64 * half + 32 * (quarter % 2) + i] >> (4 * (quarter // 2)) & 15
            codes[32 * group + i] = low | bit_pair(block[128:], group, i) << 4
    fields[0] = u16(block, 208)
    for i in range(16):
        fields[1 + i] = block[192 + i]


@integer_format(
    TensorType.IQ4_XS, planes=(4,), fields={"scale": (I8, 8)}, terms=lambda f, group: [(f["scale"][group], None)],
    bias_bits=7, table=_IQ4_TABLE,
)  # fmt: skip
def iq4_xs(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, upper bit pairs of scales, their nibbles, nibbles."""
    for group in range(8):
        _nibbles(block[8 + 16 * group :], codes[32 * group :])
        low = block[4 + group // 2] >> (4 * (group % 2)) & 15
        high = u16(block, 2) >> (2 * group) & 3
        fields[1 + group] = np.uint8((low | high << 4) - 32)
    fields[0] = u16(block, 0)


_E2M1_TABLE = tuple(value + 16 for value in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Numbers of E2M1 doubled, plus 16."""


@integer_format(TensorType.MXFP4, planes=(4,), fields={"d": (E8M0_HALF, 1)}, bias_bits=4, table=_E2M1_TABLE)
def mxfp4(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: exponent, nibbles."""
    _nibbles(block[1:], codes)
    fields[0] = block[0]


@integer_format(
    TensorType.NVFP4, planes=(4,), fields={"scale": (E4M3_HALF, 4)}, factors=lambda _: (None, None), terms=_half_scales,
    bias_bits=4, table=_E2M1_TABLE,
)  # fmt: skip
def nvfp4(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: 4 scales (without sign, 127 is 0), nibbles of 16."""
    for part in range(4):
        fields[part] = 0 if block[part] == 127 else block[part] & 127
        for i in range(8):
            codes[16 * part + i] = block[4 + 8 * part + i] & 15
            codes[16 * part + 8 + i] = block[4 + 8 * part + i] >> 4


@integer_format(TensorType.Q8_K, planes=(8,), fields={"d": (F32, 1)}, bias_bits=7)
def q8_k(block: Bytes, codes: Bytes, fields: Fields) -> None:
    """Block layout: d, int8 codes, their sums."""
    for i in range(256):
        codes[i] = block[4 + i] ^ 0x80
    fields[0] = np.uint32(u16(block, 0)) | np.uint32(u16(block, 2)) << 16

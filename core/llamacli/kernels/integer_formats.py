"""GGML's integer formats: how their blocks are read, and what their numbers mean.

Layouts as in GGML's `block_q*` structures. Decoders take uint8 [n_rows, n_blocks, bytes] and return codes, uint8
[n_rows, n_blocks, groups, 32], and the fields that stand beside them, [n_rows, n_blocks, count].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamacli.kernels import ir
from llamacli.kernels.formats import Bytes, FieldKind, Vector, integer_format
from llamacli.quantization import TensorType

Fields = dict[str, np.ndarray]

# --- kinds of scales -------------------------------------------------------------------------------------------------


def _load_int(b: ir.Builder, address: ir.Value, signed: bool) -> ir.Value:
    stored = ir.load(b, address, ir.I8X16)
    return b.sext(stored, ir.I32X16) if signed else b.zext(stored, ir.I32X16)


def _load_e8m0(b: ir.Builder, address: ir.Value) -> Vector:
    """Half of 2^(e - 127), by the bits of the float; the two smallest are subnormal."""
    e = _load_int(b, address, signed=False)
    small = b.shl(ir.constant(ir.I32X16, 0x00200000), e)
    normal = b.shl(b.sub(e, ir.constant(ir.I32X16, 1)), ir.constant(ir.I32X16, 23))
    bits = b.select(b.icmp_unsigned("<", e, ir.constant(ir.I32X16, 2)), small, normal)
    return Vector(b, b.bitcast(bits, ir.F32X16))


def _load_nibbles(b: ir.Builder, address: ir.Value) -> tuple[Vector, Vector]:
    both = _load_int(b, address, signed=False)
    low = b.and_(both, ir.constant(ir.I32X16, 15))
    return Vector(b, ir.to_f32(b, low)), Vector(b, ir.to_f32(b, b.lshr(both, ir.constant(ir.I32X16, 4))))


def _to_floats(stored: np.ndarray) -> np.ndarray:
    return stored.astype(np.float32)


F16 = FieldKind(np.float16, _to_floats, lambda b, address: Vector(b, ir.load_f16(b, address)))
U8 = FieldKind(np.uint8, _to_floats, lambda b, address: Vector(b, ir.to_f32(b, _load_int(b, address, signed=False))))
I8 = FieldKind(np.int8, _to_floats, lambda b, address: Vector(b, ir.to_f32(b, _load_int(b, address, signed=True))))
E8M0_HALF = FieldKind(np.uint8, lambda stored: np.ldexp(np.float32(1), stored.astype(np.int32) - 128), _load_e8m0)
U4_PAIR = FieldKind(np.uint8, lambda stored: (_to_floats(stored & 15), _to_floats(stored >> 4)), _load_nibbles)

# --- formulas --------------------------------------------------------------------------------------------------------


def _scaled(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["d"][0], None)]


def _scaled_and_shifted(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["d"][0], f["m"][0])]


def _two_level(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["d"][0] * f["scale"][group], None)]


def _two_level_with_min(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["d"][0] * f["scale"][group], -(f["dmin"][0] * f["min"][group]))]


def _two_level_halves(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    return [(f["d"][0] * f["scale"][2 * group + half], None) for half in (0, 1)]


def _two_level_halves_with_min(f: dict[str, Any], group: int) -> list[tuple[Any, Any]]:
    pairs = [f["scale_min"][2 * group + half] for half in (0, 1)]
    return [(f["d"][0] * scale, -(f["dmin"][0] * least)) for scale, least in pairs]


# --- decoding --------------------------------------------------------------------------------------------------------


def _f16(blocks: Bytes, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., 16] bytes to [..., 32] codes: low nibbles, then high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """[..., 4] bytes to their 32 bits, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _nibble_groups(packed: Bytes) -> Bytes:
    """[..., 128] bytes to [..., 8, 32] codes: of each 32 bytes the low nibbles are a group, the high ones the next."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _bit_pair_groups(packed: Bytes) -> Bytes:
    """[..., 64] bytes to [..., 8, 32] codes of 2 bits: each 32 bytes hold four groups, lowest bits first."""
    chunks = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((chunks >> shifts) & 3).reshape(*packed.shape[:-1], 8, 32)


def _bit_groups(packed: Bytes) -> Bytes:
    """[..., 32] bytes to [..., 8, 32] bits: bit g of each byte belongs to group g."""
    return (packed[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to 8 scales and 8 minima of 6 bits."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, mins


@integer_format(
    TensorType.Q8_0, file_bytes=34, groups=1, planes=(8,), fields={"d": (F16, 1)}, formula=_scaled, bias_bits=7
)
def _q8_0(blocks: Bytes) -> tuple[Bytes, Fields]:
    return blocks[..., None, 2:] ^ 0x80, {"d": _f16(blocks, 0)}


@integer_format(
    TensorType.Q4_0, file_bytes=18, groups=1, planes=(4,), fields={"d": (F16, 1)}, formula=_scaled, bias_bits=3
)
def _q4_0(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibbles(blocks[..., None, 2:]), {"d": _f16(blocks, 0)}


@integer_format(
    TensorType.Q4_1, file_bytes=20, groups=1, planes=(4,), fields={"d": (F16, 1), "m": (F16, 1)},
    formula=_scaled_and_shifted,
)  # fmt: skip
def _q4_1(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibbles(blocks[..., None, 4:]), {"d": _f16(blocks, 0), "m": _f16(blocks, 2)}


@integer_format(
    TensorType.Q5_0, file_bytes=22, groups=1, planes=(4, 1), fields={"d": (F16, 1)}, formula=_scaled, bias_bits=4
)
def _q5_0(blocks: Bytes) -> tuple[Bytes, Fields]:
    codes = _nibbles(blocks[..., 6:]) | (_bits(blocks[..., 2:6]) << 4)
    return codes[..., None, :], {"d": _f16(blocks, 0)}


@integer_format(
    TensorType.Q5_1, file_bytes=24, groups=1, planes=(4, 1), fields={"d": (F16, 1), "m": (F16, 1)},
    formula=_scaled_and_shifted,
)  # fmt: skip
def _q5_1(blocks: Bytes) -> tuple[Bytes, Fields]:
    codes = _nibbles(blocks[..., 8:]) | (_bits(blocks[..., 4:8]) << 4)
    return codes[..., None, :], {"d": _f16(blocks, 0), "m": _f16(blocks, 2)}


@integer_format(
    TensorType.Q2_K, file_bytes=84, groups=8, planes=(2,),
    fields={"d": (F16, 1), "dmin": (F16, 1), "scale_min": (U4_PAIR, 16)}, formula=_two_level_halves_with_min,
)  # fmt: skip
def _q2_k(blocks: Bytes) -> tuple[Bytes, Fields]:
    fields = {"d": _f16(blocks, 80), "dmin": _f16(blocks, 82), "scale_min": blocks[..., :16]}
    return _bit_pair_groups(blocks[..., 16:80]), fields


@integer_format(
    TensorType.Q3_K, file_bytes=110, groups=8, planes=(2, 1), fields={"d": (F16, 1), "scale": (I8, 16)},
    formula=_two_level_halves, bias_bits=2,
)  # fmt: skip
def _q3_k(blocks: Bytes) -> tuple[Bytes, Fields]:
    codes = _bit_pair_groups(blocks[..., 32:96]) | (_bit_groups(blocks[..., :32]) << 2)
    low = _nibbles(blocks[..., 96:104])
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((blocks[..., None, 104:108] >> shifts) & 3).reshape(low.shape)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    return codes, {"d": _f16(blocks, 108), "scale": scales}


_K_FIELDS = {"d": (F16, 1), "dmin": (F16, 1), "scale": (U8, 8), "min": (U8, 8)}


def _k_fields(blocks: Bytes) -> Fields:
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    return {"d": _f16(blocks, 0), "dmin": _f16(blocks, 2), "scale": scales, "min": mins}


@integer_format(TensorType.Q4_K, file_bytes=144, groups=8, planes=(4,), fields=_K_FIELDS, formula=_two_level_with_min)
def _q4_k(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibble_groups(blocks[..., 16:]), _k_fields(blocks)


@integer_format(TensorType.Q5_K, file_bytes=176, groups=8, planes=(4, 1), fields=_K_FIELDS, formula=_two_level_with_min)
def _q5_k(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibble_groups(blocks[..., 48:]) | (_bit_groups(blocks[..., 16:48]) << 4), _k_fields(blocks)


@integer_format(
    TensorType.Q6_K, file_bytes=210, groups=8, planes=(4, 2), fields={"d": (F16, 1), "scale": (I8, 16)},
    formula=_two_level_halves, bias_bits=5,
)  # fmt: skip
def _q6_k(blocks: Bytes) -> tuple[Bytes, Fields]:
    quarters = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 2, 32)
    low = np.concatenate([quarters & 15, quarters >> 4], axis=-3).reshape(*blocks.shape[:-1], 8, 32)
    codes = low | (_bit_pair_groups(blocks[..., 128:192]) << 4)
    return codes, {"d": _f16(blocks, 208), "scale": np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)}


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_TABLE = tuple(value + 128 for value in _IQ4_VALUES)


@integer_format(
    TensorType.IQ4_NL, file_bytes=18, groups=1, planes=(4,), fields={"d": (F16, 1)}, formula=_scaled, bias_bits=7,
    table=_IQ4_TABLE,
)  # fmt: skip
def _iq4_nl(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibbles(blocks[..., None, 2:]), {"d": _f16(blocks, 0)}


@integer_format(
    TensorType.IQ4_XS, file_bytes=136, groups=8, planes=(4,), fields={"d": (F16, 1), "scale": (I8, 8)},
    formula=_two_level, bias_bits=7, table=_IQ4_TABLE,
)  # fmt: skip
def _iq4_xs(blocks: Bytes) -> tuple[Bytes, Fields]:
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:-1], 8)
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | (high.astype(np.uint8) << 4)).view(np.int8) - np.int8(32)
    codes = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16))
    return codes, {"d": _f16(blocks, 0), "scale": scales}


_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@integer_format(
    TensorType.MXFP4, file_bytes=17, groups=1, planes=(4,), fields={"d": (E8M0_HALF, 1)}, formula=_scaled, bias_bits=4,
    table=tuple(value + 16 for value in _E2M1_DOUBLED),
)  # fmt: skip
def _mxfp4(blocks: Bytes) -> tuple[Bytes, Fields]:
    return _nibbles(blocks[..., None, 1:]), {"d": blocks[..., :1]}

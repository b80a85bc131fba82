"""The types of the KV cache in registers: emitting the loads of keys and values, and what writes a token's.

How they lie in memory is said in `llamacli.kv.types`, where NumPy does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from llamacli.kernels import ir, simd
from llamacli.kv.types import BLOCK, KV_TYPES, PAGE, UNIT, FloatType, IntegerType

NUMBERS = {name: number for number, name in enumerate(KV_TYPES)}
"""Types by numbers, which Numba's literals can be."""

_TYPES = list(KV_TYPES.values())
_I16X16 = ir.ir.VectorType(ir.I16, ir.LANES)
_I8X8 = ir.ir.VectorType(ir.I8, 8)


def dims_at_once(number: int) -> int:
    """How many dimensions of keys `load_keys` gives: a unit, or one where floats need no unit to be whole."""
    return 1 if isinstance(_TYPES[number], FloatType) else UNIT


def load_keys(b: ir.Builder, number: int, part: ir.Value, i: ir.Value) -> list[ir.Value]:
    """The keys of 16 cells in the i-th `dims_at_once` dimensions of a part, a vector each."""
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        return [_load_float(b, kind, b.add(part, b.mul(i, ir.I64(PAGE * kind.item.itemsize))))]
    block, unit = _unit(b, kind, part, i)
    scale, offset = _scale(b, kind, lambda field: ir.load_f16(b, ir.offset(b, block, 2 * PAGE * field)))
    rows = [
        ir.load(b, ir.offset(b, unit, kind.high_bytes + PAGE * row), ir.I8X16)
        for row in range(UNIT if kind.bits == 8 else UNIT // 2)
    ]
    if kind.bits < 8:
        low, high = ir.constant(ir.I8X16, 15), ir.constant(ir.I8X16, 4)
        rows = [b.and_(row, low) for row in rows] + [b.lshr(row, high) for row in rows]
    fifth: list[ir.Value | None] = [None] * UNIT
    if kind.bits == 5:
        words = b.zext(ir.load(b, unit, _I16X16), ir.I32X16)
        fifth = [_fifth_bit(b, words, ir.constant(ir.I32X16, dim)) for dim in range(UNIT)]
    return [_number(b, kind, row, bit, scale, offset) for row, bit in zip(rows, fifth, strict=True)]


def value_loader(
    b: ir.Builder, number: int, part: ir.Value, column: ir.Value, head_dim: ir.Value
) -> Callable[[ir.Value], ir.Value]:
    """What emits the load of 16 dimensions from `column`, a multiple of 16, on: of the cell that it is given."""
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        size = ir.I64(kind.item.itemsize)
        start, row_bytes = b.add(part, b.mul(column, size)), b.mul(head_dim, size)
        return lambda cell: _load_float(b, kind, b.add(start, b.mul(cell, row_bytes)))
    block, unit = _unit(b, kind, part, b.lshr(column, ir.I64(4)))
    codes = ir.offset(b, unit, kind.high_bytes)

    def load(cell: ir.Value) -> ir.Value:
        words = b.mul(cell, ir.I64(2))
        scale, offset = _scale(
            b, kind, lambda field: _splat_f16(b, b.add(ir.offset(b, block, 2 * PAGE * field), words))
        )
        if kind.bits == 8:
            row = ir.load(b, b.add(codes, b.mul(cell, ir.I64(UNIT))), ir.I8X16)
            return _number(b, kind, row, None, scale, offset)
        packed = ir.load(b, b.add(codes, b.mul(cell, ir.I64(UNIT // 2))), _I8X8)
        low, high = b.and_(packed, ir.constant(_I8X8, 15)), b.lshr(packed, ir.constant(_I8X8, 4))
        row = b.shuffle_vector(low, high, ir.ir.Constant(ir.I32X16, list(range(UNIT))))
        bit = None
        if kind.bits == 5:
            word = ir.splat(b, b.zext(ir.load(b, b.add(unit, words), ir.I16), ir.I32))
            bit = _fifth_bit(b, word, ir.ir.Constant(ir.I32X16, list(range(UNIT))))
        return _number(b, kind, row, bit, scale, offset)

    return load


def _load_float(b: ir.Builder, kind: FloatType, address: ir.Value) -> ir.Value:
    if kind.is_bf16:
        return ir.load_bf16(b, address)
    return ir.load_f16(b, address) if kind.item == np.float16 else ir.load(b, address, ir.F32X16)


def _unit(b: ir.Builder, kind: IntegerType, part: ir.Value, unit: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The addresses of a unit's block and of the unit."""
    block = b.add(part, b.mul(b.lshr(unit, ir.I64(1)), ir.I64(kind.block_bytes)))
    within = b.mul(b.and_(unit, ir.I64(1)), ir.I64(kind.unit_bytes))
    return block, b.add(ir.offset(b, block, kind.header_bytes), within)


def _scale(
    b: ir.Builder, kind: IntegerType, field: Callable[[int], ir.Value]
) -> tuple[ir.Value, ir.Value | None]:  # fmt: skip
    """The scale, and what is added to it times the code. A code's bias is taken out with the offset, exactly."""
    scale = field(0)
    if kind.has_offset:
        return scale, field(1)
    return scale, None if kind.table else b.fmul(scale, ir.constant(ir.F32X16, -kind.bias))


def _number(
    b: ir.Builder, kind: IntegerType, codes: ir.Value, fifth: ir.Value | None, scale: ir.Value, offset: ir.Value | None
) -> ir.Value:
    """16 codes as numbers."""
    if kind.table:
        return b.fmul(b.sitofp(ir.look_up(b, kind.table, codes), ir.F32X16), scale)
    wide = b.zext(codes, ir.I32X16)
    if fifth is not None:
        wide = b.or_(wide, fifth)
    return ir.fma(b, ir.to_f32(b, wide), scale, offset)


def _fifth_bit(b: ir.Builder, words: ir.Value, places: ir.Value) -> ir.Value:
    bit = b.and_(b.lshr(words, places), ir.constant(ir.I32X16, 1))
    return b.shl(bit, ir.constant(ir.I32X16, 4))


def _splat_f16(b: ir.Builder, address: ir.Value) -> ir.Value:
    return ir.splat(b, b.fpext(b.bitcast(ir.load(b, address, ir.I16), ir.HALF), ir.F32))


# --- writing ---------------------------------------------------------------------------------------------------------


@functools.cache
def writer(name: str, is_key: bool) -> Callable[..., None]:
    """A compiled function `(x, head_dim, part, lane)`: put float32 [head_dim] into a cell of a part."""
    kind = KV_TYPES[name]
    return _float_writer(name, kind, is_key) if isinstance(kind, FloatType) else _integer_writer(kind, is_key)


def _float_writer(name: str, kind: FloatType, is_key: bool) -> Callable[..., None]:
    size = kind.item.itemsize
    write_one = {"f32": simd.write_f32, "f16": simd.write_f16, "bf16": simd.write_bf16}[name]

    @njit(error_model="numpy")
    def write(x: Any, head_dim: Any, part: Any, lane: Any) -> None:
        place, step = part + size * (lane if is_key else lane * head_dim), size * (PAGE if is_key else 1)
        for d in range(head_dim):
            write_one(place + d * step, simd.read_f32(x + 4 * d))

    return write


def _integer_writer(kind: IntegerType, is_key: bool) -> Callable[..., None]:
    bits, has_offset, has_table = kind.bits, kind.has_offset, bool(kind.table)
    header, unit_bytes, high = kind.header_bytes, kind.unit_bytes, kind.high_bytes
    last, half, extreme = np.float32(kind.last_code), np.float32(kind.bias + 0.5), np.float32(kind.extreme or 1)
    table, midpoints = np.array(kind.table or (0,), np.float64), np.array(kind.midpoints or (0,), np.float32)
    row = UNIT if bits == 8 else UNIT // 2
    step, own = (PAGE, 1) if is_key else (1, row)

    @njit(error_model="numpy")
    def code_of(step_: Any) -> Any:
        """The nearest code; 0 where it is no number."""
        if has_table:
            nearest = 0
            for i in range(15):
                nearest += step_ > midpoints[i]
            return nearest
        rounded = np.floor(step_ + half)
        return int(min(rounded, last)) if rounded > 0 else 0

    @njit(error_model="numpy")
    def write(x: Any, head_dim: Any, part: Any, lane: Any) -> None:
        block = part
        for start in range(0, head_dim, BLOCK):
            n = min(BLOCK, head_dim - start)
            low = top = simd.read_f32(x + 4 * start)
            for i in range(start + 1, start + n):
                value = simd.read_f32(x + 4 * i)
                low, top = min(low, value), max(top, value)
            offset = low if has_offset else np.float32(0)
            scale = (top - low) / last if has_offset else (low if -low >= top else top) / extreme
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            if has_table:
                product = square = 0.0
                for i in range(start, start + n):
                    value = simd.read_f32(x + 4 * i)
                    entry, weight = table[code_of((value - offset) * inverse)], np.float64(value) * value
                    square += weight * entry * entry
                    product += weight * entry * value
                scale = np.float32(product / square) if square > 0 else np.float32(0)
            simd.write_f16(block + 2 * lane, scale)
            if has_offset:
                simd.write_f16(block + 2 * PAGE + 2 * lane, offset)
            unit = block + header
            for first in range(start, start + n, UNIT):
                codes = unit + high + lane * own
                word = 0
                for i in range(row):
                    byte = 0
                    if first + i < head_dim:
                        byte = code_of((simd.read_f32(x + 4 * (first + i)) - offset) * inverse)
                    if bits < 8:
                        other = 0
                        if first + i + row < head_dim:
                            other = code_of((simd.read_f32(x + 4 * (first + i + row)) - offset) * inverse)
                        word |= (byte >> 4) << i | (other >> 4) << (i + row)
                        byte = byte & 15 | (other & 15) << 4
                    simd.write_u8(codes + i * step, byte)
                if bits == 5:
                    simd.write_u16(unit + 2 * lane, word)
                unit += unit_bytes
            block = unit

    return write

"""SIMD vectors of 16 float32 as Numba values, with their operations.

Addresses are integers. Bounds are not checked: callers check shapes before a kernel runs.
"""

from __future__ import annotations

from typing import Any

from llamacli.kernels import ir
from llamacli.kernels.deferred import Deferred, types


def _vector_type() -> Any:
    """Numba type of 16 float32, in one register or several narrower."""
    from numba.core import types
    from numba.extending import models, register_model

    class Float32x16(types.Type):
        def __init__(self) -> None:
            super().__init__("f32x16")

    @register_model(Float32x16)
    class _Float32x16Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, numba_type: Any) -> None:
            super().__init__(manager, numba_type, ir.F32X16)

    return Float32x16()


f32x16 = Deferred(_vector_type)
f32, i64, void = types.float32, types.int64, types.void

load_f16 = ir.expose(f32x16, i64)(ir.load_f16)
store = ir.expose(void, i64, f32x16)(ir.store)
store_f16 = ir.expose(void, i64, f32x16)(ir.store_f16)
exp = ir.expose(f32x16, f32x16)(ir.exp)
fma = ir.expose(f32x16, f32x16, f32x16, f32x16)(ir.fma)
minimum = ir.expose(f32x16, f32x16, f32x16)(ir.minimum)
maximum = ir.expose(f32x16, f32x16, f32x16)(ir.maximum)
rint = ir.expose(f32x16, f32x16)(ir.rint)
round_f16 = ir.expose(f32x16, f32x16)(ir.round_f16)
absolute = ir.expose(f32x16, f32x16)(ir.absolute)
sqrt = ir.expose(f32x16, f32x16)(ir.sqrt)
log = ir.expose(f32x16, f32x16)(ir.log)
first_lanes = ir.expose(f32x16, f32x16, i64, f32x16)(ir.first_lanes)
sum_f32 = ir.expose(f32, f32x16)(ir.sum_f32)
max_f32 = ir.expose(f32, f32x16)(ir.max_f32)
min_f32 = ir.expose(f32, f32x16)(ir.min_f32)


@ir.expose(f32x16, i64)
def load(b: ir.Builder, address: ir.Value) -> ir.Value:
    """Load 16 float32."""
    return ir.load(b, address, ir.F32X16)


@ir.expose(f32x16)
def lane_numbers(b: ir.Builder) -> ir.Value:
    """0 to 15, one in each lane."""
    return ir.ir.Constant(ir.F32X16, [float(i) for i in range(ir.LANES)])


@ir.expose(f32x16, f32)
def splat(b: ir.Builder, x: ir.Value) -> ir.Value:
    """Broadcast a scalar to every lane."""
    return ir.splat(b, x)


@ir.expose(f32x16, f32x16, f32x16)
def add(b: ir.Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x + y."""
    return b.fadd(x, y)


@ir.expose(f32x16, f32x16, f32x16)
def sub(b: ir.Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x - y."""
    return b.fsub(x, y)


@ir.expose(f32x16, f32x16, f32x16)
def mul(b: ir.Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x * y."""
    return b.fmul(x, y)


@ir.expose(f32x16, f32x16, f32x16)
def div(b: ir.Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x / y."""
    return b.fdiv(x, y)


@ir.expose(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_less(b: ir.Builder, x: ir.Value, y: ir.Value, then: ir.Value, otherwise: ir.Value) -> ir.Value:
    """`then` in the lanes where x < y, else `otherwise`, as for NaN."""
    return b.select(b.fcmp_ordered("<", x, y), then, otherwise)


@ir.expose(f32x16, f32x16, i64)
def butterfly(b: ir.Builder, x: ir.Value, size: ir.Value) -> ir.Value:
    """Hadamard transform of each `size` lanes, a power of two, not normalised."""
    for half in (1, 2, 4, 8):
        signs = ir.ir.Constant(ir.F32X16, [-1.0 if lane & half else 1.0 for lane in range(ir.LANES)])
        halved = ir.fma(b, x, signs, ir.exchange_lanes(b, x, half))
        x = b.select(b.icmp_signed(">", size, ir.I64(half)), halved, x)
    return x


@ir.expose(f32, i64)
def read_f32(b: ir.Builder, address: ir.Value) -> ir.Value:
    """Load a float32."""
    return ir.load(b, address, ir.F32)


@ir.expose(void, i64, f32)
def write_f32(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store a float32."""
    ir.store(b, address, value)


@ir.expose(void, i64, f32)
def write_f16(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store a float32 rounded to float16."""
    ir.store(b, address, b.bitcast(b.fptrunc(value, ir.HALF), ir.I16))


@ir.expose(i64, f32)
def f16_bits(b: ir.Builder, value: ir.Value) -> ir.Value:
    """Bits of the nearest float16."""
    return b.zext(b.bitcast(b.fptrunc(value, ir.HALF), ir.I16), ir.I64)


@ir.expose(void, i64, f32)
def write_bf16(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store a float32 as bfloat16, ties to even; NaN stays NaN."""
    bits = b.bitcast(value, ir.I32)
    upper = b.lshr(bits, ir.I32(16))
    rounded = b.lshr(b.add(bits, b.add(ir.I32(0x7FFF), b.and_(upper, ir.I32(1)))), ir.I32(16))
    is_nan = b.fcmp_unordered("uno", value, value)
    ir.store(b, address, b.trunc(b.select(is_nan, b.or_(upper, ir.I32(64)), rounded), ir.I16))


@ir.expose(void, i64, i64)
def write_u8(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store the lowest byte of an integer."""
    ir.store(b, address, b.trunc(value, ir.I8))


@ir.expose(void, i64, i64)
def write_u16(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store the lowest two bytes of an integer."""
    ir.store(b, address, b.trunc(value, ir.I16))


@ir.expose(void, i64)
def prefetch(b: ir.Builder, address: ir.Value) -> None:
    """Prefetch a cache line to the second-level cache."""
    ir.prefetch(b, address, 1, level=2)


@ir.expose(i64, i64, i64)
def atomic_add(b: ir.Builder, address: ir.Value, value: ir.Value) -> ir.Value:
    """Add to an int64 that threads share; what it was."""
    return b.atomic_rmw("add", b.inttoptr(address, ir.I64.as_pointer()), value, "seq_cst")


@ir.expose(i64, i64)
def read_i64(b: ir.Builder, address: ir.Value) -> ir.Value:
    """Load an int64."""
    return ir.load(b, address, ir.I64)


@ir.expose(void, i64, i64)
def write_i64(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store an int64."""
    ir.store(b, address, value)


@ir.expose(types.voidptr, i64)
def pointer(b: ir.Builder, address: ir.Value) -> ir.Value:
    """Convert an address to a pointer, for `numba.carray`."""
    return b.inttoptr(address, ir.I8.as_pointer())

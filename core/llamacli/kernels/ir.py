"""Vector operations of kernels: functions that emit LLVM IR.

Vectors are 512 bits wide whatever the CPU; LLVM splits them where registers are narrower. `b` is the IR builder. Only
the integer dot product and the byte table look-up need their own instructions for each instruction set; LLVM compiles
the rest well by itself.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir as ir

from llamacli.kernels.deferred import resolved
from llamacli.kernels.isa import ARM, AVX512, isa

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class _BFloatType(ir.HalfType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()
BFLOAT = _BFloatType()
F32X16, I32X16 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
I8X64, I8X16 = (ir.VectorType(I8, lanes) for lanes in (64, 16))
I16X32 = ir.VectorType(I16, 2 * LANES)

Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value


# --- memory ----------------------------------------------------------------------------------------------------------
def load(b: Builder, address: Value, kind: ir.Type) -> Value:
    """Load a value of `kind` from a byte address, aligned or not."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store(b: Builder, address: Value, value: Value) -> None:
    """Store a value at a byte address, which need not be aligned."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def offset(b: Builder, address: Value, n_bytes: int) -> Value:
    """An address plus a constant."""
    return b.add(address, I64(n_bytes)) if n_bytes else address


def prefetch(b: Builder, address: Value, n_bytes: int, level: int = 1) -> None:
    """Prefetch the cache lines of `n_bytes` to cache `level` 1 or 2."""
    for line in range(0, n_bytes, 64):
        pointer = b.inttoptr(offset(b, address, line), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(4 - level), I32(1))


def keep_order(b: Builder) -> None:
    """Keep loads and prefetches on their side, without a machine instruction."""
    b.fence("seq_cst", "singlethread")


def opaque(b: Builder, address: Value) -> Value:
    """The same address, which LLVM takes for another.

    It would load what is broadcast to several multiplications once, to a register. With AVX-512 each of them broadcasts
    from memory by itself at no cost, while a broadcast of its own takes the time of one on Zen 4.
    """
    if isa() not in AVX512:
        return address
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], False)


def load_f16(b: Builder, address: Value) -> Value:
    """Load 16 float16 as float32."""
    return b.fpext(b.bitcast(load(b, address, ir.VectorType(I16, LANES)), ir.VectorType(HALF, LANES)), F32X16)


def load_bf16(b: Builder, address: Value) -> Value:
    """Load 16 bfloat16 as float32: they are its upper halves."""
    bits = b.zext(load(b, address, ir.VectorType(I16, LANES)), I32X16)
    return b.bitcast(b.shl(bits, constant(I32X16, 16)), F32X16)


def store_f16(b: Builder, address: Value, value: Value) -> None:
    """Store 16 float32 rounded to float16."""
    half = b.fptrunc(value, ir.VectorType(HALF, LANES))
    store(b, address, b.bitcast(half, ir.VectorType(I16, LANES)))


def load_bf16_pairs(b: Builder, address: Value) -> tuple[Value, Value]:
    """Load 32 bfloat16 as two vectors of float32: even and odd ones."""
    bits = load(b, address, I32X16)
    halves = b.shl(bits, constant(I32X16, 16)), b.and_(bits, constant(I32X16, -65536))
    return b.bitcast(halves[0], F32X16), b.bitcast(halves[1], F32X16)


def stack(b: Builder, n_bytes: int) -> Value:
    """Address of memory on the stack, whole vectors."""
    with b.goto_entry_block():
        return b.ptrtoint(b.alloca(ir.ArrayType(F32X16, n_bytes // 64)), I64)


# --- constants and broadcasts ----------------------------------------------------------------------------------------
def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """The same constant in every lane."""
    if kind.element == F32:
        value = float32(value).constant
    key = f"{kind} {value!r}"
    if key not in _splats:
        _splats[key] = ir.Constant(kind, [value] * kind.count)
    return _splats[key]


def float32(value: float) -> ir.Constant:
    """The nearest float32: LLVM takes no other constants of that type."""
    return F32(struct.unpack("f", struct.pack("f", value))[0])


_splats: dict[str, ir.Constant] = {}
"""Constants by type and value: llvmlite keeps the text of each, whose making was half of the IR of a product."""


@functools.cache
def lane_numbers(*lanes: int) -> ir.Constant:
    """Vector of lane numbers: int32, for shuffles."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))


def splat(b: Builder, scalar: Value, lanes: int = LANES) -> Value:
    """A scalar in every lane."""
    kind = ir.VectorType(scalar.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(first, first, lane_numbers(*[0] * lanes))


def broadcast_f32(b: Builder, address: Value) -> Value:
    """Broadcast a float32 from memory to every lane."""
    return splat(b, load(b, address, F32))


def broadcast_i32(b: Builder, address: Value) -> Value:
    """Broadcast an int32 from memory to every lane."""
    return splat(b, load(b, address, I32))


def broadcasts_i32(b: Builder, address: Value, n: int) -> list[Value]:
    """Broadcast n consecutive int32, each to its own vector; 4 divides n."""
    if isa() not in ARM:
        return [broadcast_i32(b, offset(b, address, 4 * i)) for i in range(n)]
    # ARM multiplies by a lane of a register, so four of them share one.
    fours = [load(b, offset(b, address, 4 * i), ir.VectorType(I32, 4)) for i in range(0, n, 4)]
    lanes = [lane_numbers(*[lane] * LANES) for lane in range(4)]
    return [b.shuffle_vector(four, four, lane) for four in fours for lane in lanes]


# --- arithmetic ------------------------------------------------------------------------------------------------------
def call(b: Builder, name: str, result: ir.Type, *args: Value) -> Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), args)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", F32X16, x, y, z)


def to_f32(b: Builder, x: Value) -> Value:
    """int32 lanes as float32."""
    return b.sitofp(x, F32X16)


def rint(b: Builder, x: Value) -> Value:
    """float32 lanes to the nearest whole number, ties to even."""
    return call(b, "llvm.rint.v16f32", F32X16, x)


def round_i32(b: Builder, x: Value) -> Value:
    """float32 lanes to the nearest int32, ties to even."""
    return b.fptosi(rint(b, x), I32X16)


def store_i16(b: Builder, address: Value, value: Value) -> None:
    """Store 16 float32 rounded to the nearest int16, ties to even."""
    store(b, address, b.trunc(round_i32(b, value), ir.VectorType(I16, LANES)))


def round_f16(b: Builder, x: Value) -> Value:
    """float32 lanes to the nearest float16, ties to even, kept as float32."""
    return b.fpext(b.fptrunc(x, ir.VectorType(HALF, LANES)), F32X16)


def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger of each pair of lanes; y's where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: Builder, x: Value, y: Value) -> Value:
    """The smaller of each pair of lanes; y's where x is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def absolute(b: Builder, x: Value) -> Value:
    """|x|."""
    return call(b, "llvm.fabs.v16f32", F32X16, x)


def sqrt(b: Builder, x: Value) -> Value:
    """Square root of each lane."""
    return call(b, "llvm.sqrt.v16f32", F32X16, x)


def first_lanes(b: Builder, x: Value, count: Value, otherwise: Value) -> Value:
    """x in the first `count` lanes, `otherwise` in the others."""
    index = lane_numbers(*range(LANES))
    return b.select(b.icmp_signed("<", index, splat(b, b.trunc(count, I32))), x, otherwise)


def _fold(b: Builder, x: Value, combine: Callable[[Builder, Value, Value], Value]) -> Value:
    """Reduce all lanes pairwise to a scalar, always in one order."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        order = lane_numbers(*range(lanes))
        upper = lane_numbers(*range(lanes, 2 * lanes))
        x = combine(b, b.shuffle_vector(x, x, order), b.shuffle_vector(x, x, upper))
    return b.extract_element(x, I32(0))


def shuffle(b: Builder, x: Value, y: Value, lanes: list[int]) -> Value:
    """Lanes of x and, from 16 on, of y."""
    return b.shuffle_vector(x, y, lane_numbers(*lanes))


def exchange_lanes(b: Builder, x: Value, distance: int) -> Value:
    """Exchange lanes whose distance is a given power of two."""
    return shuffle(b, x, x, [lane ^ distance for lane in range(LANES)])


def reduce_rows(b: Builder, rows: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce 16 vectors: lane i is the result of vector i."""
    for half in (8, 4, 2, 1):
        low = [lane & ~half | (LANES if lane & half else 0) for lane in range(LANES)]
        rows = [
            combine(shuffle(b, x, y, low), shuffle(b, x, y, [lane | half for lane in low]))
            for x, y in zip(rows[:half], rows[half:], strict=True)
        ]
    return rows[0]


def sum_f32(b: Builder, x: Value) -> Value:
    """The sum of the lanes."""
    return _fold(b, x, lambda b, u, v: b.fadd(u, v))


def sum_f64(b: Builder, x: Value, n: Value, term: Callable[[Value], Value]) -> Value:
    """Sum of a function of n float32 at an address, in float64.

    Lane by lane of 16, then pairwise, then the numbers of the last, incomplete vector; so the order depends on n alone.
    """
    kind = ir.VectorType(F64, LANES)

    def add(size: int, first: Value, result: ir.Type) -> Callable[[Value, list[Value]], list[Value]]:
        def body(i: Value, carried: list[Value]) -> list[Value]:
            at = b.add(first, b.mul(i, I64(size)))
            found = load(b, at, F32X16 if size > 4 else F32)
            return [b.fadd(carried[0], b.fpext(term(found), result))]

        return body

    whole = b.sdiv(n, I64(LANES))
    rest = b.add(x, b.mul(whole, I64(4 * LANES)))
    (lanes,) = loop(b, whole, [constant(kind, 0.0)], add(4 * LANES, x, kind))
    total = _fold(b, lanes, lambda b, u, v: b.fadd(u, v))
    return loop(b, b.srem(n, I64(LANES)), [total], add(4, rest, F64))[0]


def sum_i32(b: Builder, x: Value) -> Value:
    """The sum of the lanes."""
    return _fold(b, x, lambda b, u, v: b.add(u, v))


def max_i32(b: Builder, x: Value) -> Value:
    """The largest lane."""
    return _fold(b, x, lambda b, u, v: b.select(b.icmp_signed(">", u, v), u, v))


def max_f32(b: Builder, x: Value) -> Value:
    """The largest lane."""
    return _fold(b, x, lambda b, u, v: b.select(b.fcmp_ordered(">", u, v), u, v))


def min_f32(b: Builder, x: Value) -> Value:
    """The smallest lane."""
    return _fold(b, x, lambda b, u, v: b.select(b.fcmp_ordered("<", u, v), u, v))


# exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor series to r^7 / 7!: below one unit
# in the last place of float32. ln 2 is taken off in two parts so that r keeps its digits (Cody and Waite 1980).
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_EXP_MIN, _EXP_MAX = -87.0, 88.0


def exp(b: Builder, x: Value) -> Value:
    """e^x for each lane, x clamped to -87 and 88."""
    x = b.select(b.fcmp_ordered("<", x, constant(F32X16, _EXP_MAX)), x, constant(F32X16, _EXP_MAX))
    x = maximum(b, x, constant(F32X16, _EXP_MIN))
    n = rint(b, b.fmul(x, constant(F32X16, _LOG2E)))
    r = fma(b, n, constant(F32X16, -_LN2_HIGH), x)
    r = fma(b, n, constant(F32X16, -_LN2_LOW), r)
    result: Value = constant(F32X16, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        result = fma(b, result, r, constant(F32X16, coefficient))
    power = b.shl(b.add(b.fptosi(n, I32X16), constant(I32X16, 127)), constant(I32X16, 23))
    return b.fmul(result, b.bitcast(power, F32X16))


# log(x) = e ln 2 + log(m) with x = 2^e m and sqrt(1/2) <= m < sqrt(2); log(m) by the series of the area tangent,
# 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = (m - 1) / (m + 1), |s| < 0.172: its terms fall below float32's last place.
_ATANH = (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)


def log(b: Builder, x: Value) -> Value:
    """Natural logarithm of positive normal lanes, within 2 ulp."""
    bits = b.bitcast(x, I32X16)
    # 0x3F3504F3 is sqrt(1/2): subtracting it before the exponent is extracted brings m to its range.
    shifted = b.sub(bits, constant(I32X16, 0x3F3504F3))
    exponent = b.ashr(shifted, constant(I32X16, 23))
    m = b.bitcast(b.sub(bits, b.shl(exponent, constant(I32X16, 23))), F32X16)
    s = b.fdiv(b.fsub(m, constant(F32X16, 1.0)), b.fadd(m, constant(F32X16, 1.0)))
    square = b.fmul(s, s)
    series: Value = constant(F32X16, _ATANH[0])
    for coefficient in _ATANH[1:]:
        series = fma(b, series, square, constant(F32X16, coefficient))
    twice = b.fadd(s, s)
    result = fma(b, b.fmul(twice, square), series, twice)
    e = to_f32(b, exponent)
    result = b.fadd(b.fmul(e, constant(F32X16, _LN2_HIGH)), fma(b, e, constant(F32X16, _LN2_LOW), result))
    zero = constant(F32X16, 0.0)
    result = b.select(b.fcmp_ordered("==", x, zero), constant(F32X16, -math.inf), result)
    return b.select(b.fcmp_unordered("<", x, zero), constant(F32X16, math.nan), result)


def dot_bf16(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """Dot product of AVX512-BF16: two bfloat16 in each int32 lane.

    total[i] + x[2i + 1] * y[2i + 1] + x[2i] * y[2i]. Sums are rounded one after another to the nearest float32;
    subnormal numbers are taken as 0.
    """
    kind = ir.VectorType(BFLOAT, 2 * LANES)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, total, b.bitcast(x, kind), b.bitcast(y, kind))


def split_bf16(b: Builder, even: Value, odd: Value) -> tuple[Value, Value]:
    """Split float32 into sums of two bfloat16.

    The numbers have at most 16 significant bits. Returns the larger parts, truncated, and the smaller ones, each as
    int32x16: an even number in the lower half of a lane, an odd one in the upper half. The sums are exact.
    """
    mask = constant(I32X16, -65536)
    numbers, upper = (even, odd), [b.and_(b.bitcast(x, I32X16), mask) for x in (even, odd)]
    rest = [b.bitcast(b.fsub(x, b.bitcast(part, F32X16)), I32X16) for x, part in zip(numbers, upper, strict=True)]
    large, small = (b.or_(odd, b.lshr(even, constant(I32X16, 16))) for even, odd in (upper, rest))
    return large, small


def round_bf16(b: Builder, low: Value, high: Value) -> Value:
    """Round 32 float32 to bfloat16 by AVX512-BF16, int16x32.

    Ties to even; subnormal numbers become 0.
    """
    kind = ir.VectorType(BFLOAT, 2 * LANES)
    rounded = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, high, low)
    return b.bitcast(rounded, ir.VectorType(I16, 2 * LANES))


# --- the integer dot product -----------------------------------------------------------------------------------------
_DOTS = {
    "avxvnni": (8, "llvm.x86.avx512.vpdpbusd.256"),
    **dict.fromkeys(AVX512, (16, "llvm.x86.avx512.vpdpbusd.512")),
    "neon": (4, "llvm.aarch64.neon.sdot.v4i32.v16i8"),
    "i8mm": (4, "llvm.aarch64.neon.usdot.v4i32.v16i8"),
}
"""Number of int32 that the dot product instruction adds to, and its LLVM name."""


def multiplies_any_bytes() -> bool:
    """True if dot products take any unsigned bytes equally fast."""
    return isa() in _DOTS and not dot_bias(8)


def dot_bias(bits: int) -> int:
    """Bias that `dots_u8s8` subtracts from unsigned bytes below 2^bits.

    Without I8MM, the instruction of ARM multiplies signed bytes only, and the sum of two products of AVX2 must fit
    int16. Below 128 that is so; a byte that may be larger gets its sign bit flipped, which takes 128 from it.
    """
    return 128 if isa() in ("neon", "avx2") and bits == 8 else 0


def dots_u8s8(b: Builder, total: Value, pairs: Sequence[tuple[Value, Value]], bits: int = 8) -> Value:
    """Dot products of unsigned and signed bytes, four in each lane.

    total[i] + sum over j < 4 of (unsigned[4i + j] - dot_bias(bits)) * signed[4i + j], and so for each pair of unsigned
    and signed vectors: int32x16 from 64 bytes each. The unsigned bytes are below 2^bits, the signed ones above -128.
    The result is exact.
    """
    if dot_bias(bits):
        pairs = [(b.xor(unsigned, constant(I8X64, 0x80)), signed) for unsigned, signed in pairs]
    if isa() == "avx2":
        # Sums of pairs of products are added as int16 as long as they fit.
        multiply, largest = (_pair_sums, 2**bits - 1) if bits < 8 else (_pair_sums_signed, 128)
        most = (2**15 - 1) // (2 * 127 * largest)
        for first in range(0, len(pairs), most):
            few = [_in_parts(b, 2, functools.partial(multiply, b), *pair) for pair in pairs[first : first + most]]
            sums = functools.reduce(b.add, few)
            total = b.add(total, _in_parts(b, 2, functools.partial(_add_pairs, b), sums))
        return total
    for pair in pairs:
        total = _dot_u8s8(b, total, *pair)
    return total


def _dot_u8s8(b: Builder, total: Value, unsigned: Value, signed: Value) -> Value:
    if isa() in _DOTS:
        lanes, name = _DOTS[isa()]
        return _in_parts(b, LANES // lanes, lambda *parts: call(b, name, parts[0].type, *parts),
                         total, unsigned, signed)  # fmt: skip
    products = b.mul(b.zext(unsigned, ir.VectorType(I32, 64)), b.sext(signed, ir.VectorType(I32, 64)))
    for j in range(4):
        every_fourth = lane_numbers(*range(j, 64, 4))
        total = b.add(total, b.shuffle_vector(products, products, every_fourth))
    return total


_PAIRS = {
    "avxvnni": (8, "llvm.x86.avx512.vpdpwssd.256"),
    **dict.fromkeys(AVX512, (16, "llvm.x86.avx512.vpdpwssd.512")),
}
"""Number of int32 that the dot product of int16 adds to, and its LLVM name."""


def dot_i16(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """Dot product of int16, two in each int32 lane, exact.

    total[i] + x[2i] * y[2i] + x[2i + 1] * y[2i + 1].
    """
    if isa() in _PAIRS:
        lanes, name = _PAIRS[isa()]
        return _in_parts(b, LANES // lanes, lambda *parts: call(b, name, parts[0].type, *parts), total, x, y)
    if isa() == "avx2":
        return _in_parts(b, 2, functools.partial(_add_products, b), total, x, y)
    products = b.mul(*(b.sext(numbers, ir.VectorType(I32, 2 * LANES)) for numbers in (x, y)))
    for j in range(2):
        total = b.add(total, b.shuffle_vector(products, products, lane_numbers(*range(j, 2 * LANES, 2))))
    return total


def shift_left(b: Builder, x: Value, bits: int) -> Value:
    """Lanes shifted left, or right without sign if `bits` is negative.

    Bytes are shifted as parts of 32-bit lanes: what comes in from a neighbour is the caller's to mask.
    """
    if bits == 0:
        return x
    words = b.bitcast(x, I32X16)
    shifted = b.shl(words, constant(I32X16, bits)) if bits > 0 else b.lshr(words, constant(I32X16, -bits))
    return b.bitcast(shifted, x.type)


_X86_SHUFFLES = {
    16: "llvm.x86.ssse3.pshuf.b.128",
    32: "llvm.x86.avx2.pshuf.b",
    64: "llvm.x86.avx512.pshuf.b.512",
}
_ARM_SHUFFLES = {16: "llvm.aarch64.neon.tbl1.v16i8"}
_SHUFFLES = {
    "avx2": (32, _X86_SHUFFLES),
    "avxvnni": (32, _X86_SHUFFLES),
    **dict.fromkeys(AVX512, (64, _X86_SHUFFLES)),
    "neon": (16, _ARM_SHUFFLES),
    "i8mm": (16, _ARM_SHUFFLES),
}
"""Largest number of codes in one look-up, and the instructions by number of codes."""


def look_up(b: Builder, table: tuple[int, ...], codes: Value) -> Value:
    """table[code], signed bytes, for 16, 32 or 64 codes below 16."""
    kind, n = codes.type, codes.type.count
    if isa() in _SHUFFLES:
        most, names = _SHUFFLES[isa()]
        lanes = min(most, n)
        entries = ir.Constant(kind, list(table) * (n // 16))
        return _in_parts(b, n // lanes, lambda *parts: call(b, names[lanes], parts[0].type, *parts), entries, codes)
    result: Value = constant(kind, table[0])
    for code, entry in enumerate(table[1:], start=1):
        result = b.select(b.icmp_unsigned("==", codes, constant(kind, code)), constant(kind, entry), result)
    return result


def _in_parts(b: Builder, n: int, f: Callable[..., Value], *vectors: Value) -> Value:
    """Apply f to each n-th of the vectors and join the results."""
    results = []
    for part in range(n):
        pieces = []
        for vector in vectors:
            lanes = vector.type.count // n
            pieces.append(b.shuffle_vector(vector, vector, lane_numbers(*range(part * lanes, (part + 1) * lanes))))
        results.append(f(*pieces))
    while len(results) > 1:
        joined = []
        for low, high in zip(results[::2], results[1::2], strict=True):
            lanes = 2 * low.type.count
            joined.append(b.shuffle_vector(low, high, lane_numbers(*range(lanes))))
        results = joined
    return results[0]


def _pair_sums(b: Builder, unsigned: Value, signed: Value) -> Value:
    """int16x16 sums of two products each; unsigned bytes up to 128 fit."""
    return call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), unsigned, signed)


def _pair_sums_signed(b: Builder, x: Value, y: Value) -> Value:
    """int16x16 sums of two signed products each; x's sign moves to y."""
    moved = call(b, "llvm.x86.avx2.psign.b", y.type, y, x)
    return _pair_sums(b, call(b, "llvm.abs.v32i8", x.type, x, ir.IntType(1)(0)), moved)


def _add_pairs(b: Builder, words: Value) -> Value:
    """int32x8 sums of two int16 each."""
    return _pair_products(b, words, constant(words.type, 1))


def _add_products(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """total + sums of two products each, added in this order.

    In another order LLVM keeps more sums than there are registers.
    """
    total = b.add(total, _pair_products(b, x, y))
    return b.asm(ir.FunctionType(total.type, [total.type]), "", "=x,0", [total], False)


def _pair_products(b: Builder, x: Value, y: Value) -> Value:
    """int32x8 sums of two products of int16 each."""
    return call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), x, y)


# --- control flow ----------------------------------------------------------------------------------------------------
def loop(
    b: Builder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Emit a counted loop: carried = body(i, carried) for i < count.

    Returns the last carried values, which stay in registers.
    """
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("loop.head", "loop.body", "loop.end"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(I64(0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    results = body(index, list(phis))
    index.add_incoming(b.add(index, I64(1)), b.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return phis


def expose(result: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate an IR emitter for Numba; `result` and `params` are types."""
    import inspect

    from llamacli.kernels.deferred import intrinsic

    def wrap(emit: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *args: Any) -> Any:
            from numba.core import types

            kind, kinds = resolved(result), map(resolved, params)

            def codegen(context: Any, builder: Builder, signature: Any, args: Any) -> Any:
                value = emit(builder, *args)
                return context.get_dummy_value() if kind is types.void else value

            return kind(*kinds), codegen

        names = ["typingctx", *list(inspect.signature(emit).parameters)[1 : 1 + len(params)]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        define.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        define.__name__, define.__doc__, define.__module__ = emit.__name__, emit.__doc__, emit.__module__
        return intrinsic(define)

    return wrap

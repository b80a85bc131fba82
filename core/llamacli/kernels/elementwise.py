"""The steps between matrix products: norm, quantisation of activations, RoPE, storing keys and values, gates, sums.

Rows of activations are float32, padded with zeros to whole vectors of 16 lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from llamacli.kernels import ir, simd
from llamacli.kernels.formats import ACTIVATION, ACTIVATION_BLOCK
from llamacli.kernels.jit import RUN, Kernel, kernel, record

RMS_NORM = record("x", "weight", "out", "stride", "width", eps=np.float32)
ROUND = record("x", "x_stride", "out", "out_stride", "width", "by_row", "slots")
ROTATE = record("x", "out", "stride", "n_heads", "head_dim", "n_dims", "first_step", "second", "cos", "sin")
SWIGLU = record("gate", "up", "out", "stride", "n_blocks", "slots")
ADD = record("a", "b", "out", "stride", "n_blocks")

_OFFSETS = {name: field[1] for name, field in ACTIVATION.fields.items()}  # type: ignore[union-attr]
_ITEM = ACTIVATION.itemsize
_TINY, _LARGEST_HALF = 1e-30, 65504.0
_LANES = ir.LANES


@njit(inline="always")
def share(count: Any, thread: Any, n_threads: Any) -> Any:
    """The part of `count` units that is this thread's: first and one past the last."""
    return thread * count // n_threads, (thread + 1) * count // n_threads


@njit(inline="always")
def rows_of(r: Any, slots: Any) -> Any:
    """First row and number of rows of a step: a run's own, or where each row has `slots` slots, all of these."""
    if slots:
        return 0, (r.n_rows - r.first_row) * slots
    return r.first_row, r.n_rows - r.first_row


@kernel
def rms_norm(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, a row a unit of work; the mean is summed in float64, as GGML does."""
    a, r = carray(simd.pointer(args), 1, RMS_NORM)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share(r.n_rows - r.first_row, thread, n_threads)
    for row in range(r.first_row + first, r.first_row + last):
        x = carray(simd.pointer(a.x + row * a.stride), a.width, np.float32)
        total = 0.0
        for i in range(a.width):
            total += np.float64(x[i] * x[i])
        mean = np.float32(total / a.width)
        scale = simd.splat(np.float32(1) / np.sqrt(mean + a.eps))
        for i in range(0, 4 * a.width, 4 * _LANES):
            place = row * a.stride + i
            normed = simd.mul(simd.load(a.x + place), scale)
            simd.store(a.out + place, simd.mul(normed, simd.load(a.weight + i)))


def _store_block(b: ir.Builder, out: ir.Value, integers: list[ir.Value], scale: ir.Value) -> None:
    """One ACTIVATION block from two vectors of integers."""
    for integer, start in zip(integers, (0, _LANES), strict=True):
        ir.store(b, ir.offset(b, out, start), b.trunc(integer, ir.I8X16))
    ir.store(b, ir.offset(b, out, _OFFSETS["scale"]), scale)
    total = ir.sum_i32(b, b.add(*integers))
    ir.store(b, ir.offset(b, out, _OFFSETS["sum"]), b.sitofp(total, ir.F32))
    ir.store(b, ir.offset(b, out, _OFFSETS["minus_sum"]), b.neg(total))
    ir.store(b, ir.offset(b, out, _OFFSETS["minus_half"]), b.neg(ir.sum_i32(b, integers[0])))


def _load_block(b: ir.Builder, x: ir.Value) -> list[ir.Value]:
    return [ir.load(b, ir.offset(b, x, start), ir.F32X16) for start in (0, 4 * _LANES)]


def _quantize_q8_0(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """32 float32 to one block: scale = largest magnitude / 127, integers rounded to nearest, ties to even.

    The scale is rounded to float16 after the integers are taken, unless it is too large for that. Blocks of nothing but
    numbers below 1e-30 become zero: the inverse of their scale would overflow.
    """
    halves = _load_block(b, x)
    largest = ir.max_f32(b, ir.maximum(b, ir.absolute(b, halves[0]), ir.absolute(b, halves[1])))
    scale = b.fdiv(largest, ir.F32(127))
    inverse = b.select(b.fcmp_ordered(">", largest, ir.F32(_TINY)), b.fdiv(ir.F32(127), largest), ir.F32(0))
    integers = [ir.round_i32(b, b.fmul(half, ir.splat(b, inverse))) for half in halves]
    rounded = b.fpext(b.fptrunc(scale, ir.HALF), ir.F32)
    _store_block(b, out, integers, b.select(b.fcmp_ordered("<", scale, ir.F32(_LARGEST_HALF)), rounded, scale))


def _quantize_q8_k(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """256 float32 to eight blocks of one scale, which makes the number of largest magnitude -127."""
    size = 4 * ACTIVATION_BLOCK
    vectors = [half for i in range(8) for half in _load_block(b, ir.offset(b, x, i * size))]
    highest = lowest = vectors[0]
    for vector in vectors[1:]:
        highest, lowest = ir.maximum(b, vector, highest), ir.minimum(b, vector, lowest)
    highest, lowest = ir.max_f32(b, highest), ir.min_f32(b, lowest)
    largest = b.select(b.fcmp_ordered(">", highest, b.fneg(lowest)), highest, lowest)
    magnitude = b.select(b.fcmp_ordered(">", largest, ir.F32(0)), largest, b.fneg(largest))
    usable = b.fcmp_ordered(">", magnitude, ir.F32(_TINY))
    inverse = b.select(usable, b.fdiv(ir.F32(-127), largest), ir.F32(0))
    scale = b.select(usable, b.fdiv(ir.F32(1), inverse), ir.F32(0))
    for i in range(8):
        pair = vectors[2 * i : 2 * i + 2]
        integers = [ir.round_i32(b, b.fmul(vector, ir.splat(b, inverse))) for vector in pair]
        _store_block(b, ir.offset(b, out, i * _ITEM), integers, scale)


def _round_f16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """32 float32 to the nearest finite float16, kept as float32."""
    for vector, start in zip(_load_block(b, x), (0, 4 * _LANES), strict=True):
        bounded = ir.minimum(b, vector, ir.constant(ir.F32X16, _LARGEST_HALF))
        bounded = ir.maximum(b, bounded, ir.constant(ir.F32X16, -_LARGEST_HALF))
        half = b.fptrunc(bounded, ir.ir.VectorType(ir.HALF, _LANES))
        ir.store(b, ir.offset(b, out, start), b.fpext(half, ir.F32X16))


def _round_bf16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """32 finite float32 to the nearest bfloat16, ties to even, kept as float32."""
    for vector, start in zip(_load_block(b, x), (0, 4 * _LANES), strict=True):
        bits = b.bitcast(vector, ir.I32X16)
        odd = b.and_(b.lshr(bits, ir.constant(ir.I32X16, 16)), ir.constant(ir.I32X16, 1))
        bits = b.add(bits, b.add(odd, ir.constant(ir.I32X16, 0x7FFF)))
        ir.store(b, ir.offset(b, out, start), b.bitcast(b.and_(bits, ir.constant(ir.I32X16, -65536)), ir.F32X16))


@attrs.frozen
class Form:
    """How activations are rounded: `convert` emits the rounding of `width` numbers, to `item_bytes` bytes."""

    width: int
    item_bytes: int
    convert: Callable[[ir.Builder, ir.Value, ir.Value], None]


FORMS = {
    "f16": Form(ACTIVATION_BLOCK, 4 * ACTIVATION_BLOCK, _round_f16),
    "bf16": Form(ACTIVATION_BLOCK, 4 * ACTIVATION_BLOCK, _round_bf16),
    "q8_0": Form(ACTIVATION_BLOCK, _ITEM, _quantize_q8_0),
    "q8_K": Form(8 * ACTIVATION_BLOCK, 8 * _ITEM, _quantize_q8_k),
}
_NUMBERED = list(FORMS.values())


@intrinsic(prefer_literal=True)
def _convert(typingctx: Any, number: Any, x: Any, out: Any) -> Any:
    """Round one unit to the form of that number, a literal."""
    if not isinstance(number, types.IntegerLiteral):
        return None
    form = _NUMBERED[number.literal_value]

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        form.convert(b, args[1], args[2])
        return context.get_dummy_value()

    return types.void(number, types.int64, types.int64), codegen


@functools.cache
def round_activations(form: str) -> Kernel:
    """The kernel that rounds activations to a form; a row a unit of work if `by_row`, else what shares a scale."""
    number, width, item_bytes = list(FORMS).index(form), FORMS[form].width, FORMS[form].item_bytes

    def round_activations(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, ROUND)[0], carray(simd.pointer(run), 1, RUN)[0]
        first_row, n_rows = rows_of(r, a.slots)
        n_units = a.width // width
        if a.by_row:
            first, last = share(n_rows, thread, n_threads)
            first, last = first * n_units, last * n_units
        else:
            first, last = share(n_rows * n_units, thread, n_threads)
        for unit in range(first, last):
            row, i = first_row + unit // n_units, unit % n_units
            _convert(number, a.x + row * a.x_stride + 4 * width * i, a.out + row * a.out_stride + item_bytes * i)

    return Kernel(round_activations, f"_{form}")


@kernel
def rotate(args: int, run: int, thread: int, n_threads: int) -> None:
    """RoPE, a head a unit of work. Pair i is elements `i * first_step` and `i * first_step + second` of the head."""
    a, r = carray(simd.pointer(args), 1, ROTATE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
    pairs = a.n_dims // 2
    for unit in range(first, last):
        row, head = r.first_row + unit // a.n_heads, unit % a.n_heads
        place = row * a.stride + 4 * head * a.head_dim
        x = carray(simd.pointer(a.x + place), a.head_dim, np.float32)
        out = carray(simd.pointer(a.out + place), a.head_dim, np.float32)
        angle = 4 * (r.n_past + row) * pairs
        cos = carray(simd.pointer(a.cos + angle), pairs, np.float32)
        sin = carray(simd.pointer(a.sin + angle), pairs, np.float32)
        for i in range(pairs):
            u, v = x[i * a.first_step], x[i * a.first_step + a.second]
            out[i * a.first_step] = u * cos[i] - v * sin[i]
            out[i * a.first_step + a.second] = u * sin[i] + v * cos[i]
        for i in range(a.n_dims, a.head_dim):
            out[i] = x[i]


@kernel
def swiglu(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = silu(gate) * up, 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, SWIGLU)[0], carray(simd.pointer(run), 1, RUN)[0]
    first_row, n_rows = rows_of(r, a.slots)
    first, last = share(n_rows * a.n_blocks, thread, n_threads)
    one, zero = simd.splat(np.float32(1)), simd.splat(np.float32(0))
    for unit in range(first, last):
        start = (first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            gate = simd.load(a.gate + place)
            silu = simd.div(gate, simd.add(one, simd.exp(simd.sub(zero, gate))))
            simd.store(a.out + place, simd.mul(silu, simd.load(a.up + place)))


@kernel
def add(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = a + b, 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, ADD)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_blocks, thread, n_threads)
    for unit in range(first, last):
        start = (r.first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            simd.store(a.out + place, simd.add(simd.load(a.a + place), simd.load(a.b + place)))

"""The steps between matrix products: norm, quantisation of activations, RoPE, storing keys and values, gates, sums.

Rows of activations are float32, padded with zeros to whole vectors of 16 lanes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from llamacli.kernels import ir, simd
from llamacli.kernels.jit import ROW, RUN, Kernel, kernel, record
from llamacli.kernels.packing_formats import ACTIVATION, ACTIVATION_BLOCK

RMS_NORM = record("x", "weight", "out", "stride", "n_heads", "head_dim", eps=np.float32)
ROUND = record("x", "x_stride", "out", "out_stride", "width", "by_row", "slots")
ROTATE = record(
    "x", "out", "stride", "n_heads", "head_dim", "n_dims", "first_step", "second", "cos", "sin", "long_from",
    "long_cos", "long_sin",
)  # fmt: skip
"""Sequences made for `long_from` tokens or more are turned by the long cosines and sines."""

GATED = record("gate", "up", "out", "stride", "n_blocks", "slots")
SIGMOID_GATE = record("x", "gate", "gate_stride", "out", "stride", "n_blocks")
ADD = record("a", "b", "out", "stride", "n_blocks")
SCALE = record("x", "out", "stride", "n_blocks", factor=np.float32)
COLUMNS = record("x", "x_stride", "out", "out_stride", "width")

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
    """out = x / sqrt(mean(x^2) + eps) * weight, a head a unit of work; the mean is summed in float64, as GGML does."""
    a, r = carray(simd.pointer(args), 1, RMS_NORM)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
    for unit in range(first, last):
        place = (r.first_row + unit // a.n_heads) * a.stride + 4 * (unit % a.n_heads) * a.head_dim
        x = carray(simd.pointer(a.x + place), a.head_dim, np.float32)
        total = 0.0
        for i in range(a.head_dim):
            total += np.float64(x[i] * x[i])
        scale = np.float32(1) / np.sqrt(np.float32(total / a.head_dim) + a.eps)
        # Only the last vector of a row may be written beyond its end, where there is padding.
        whole = a.head_dim if a.n_heads == 1 else a.head_dim // _LANES * _LANES
        for i in range(0, 4 * whole, 4 * _LANES):
            normed = simd.mul(simd.load(a.x + place + i), simd.splat(scale))
            simd.store(a.out + place + i, simd.mul(normed, simd.load(a.weight + i)))
        for i in range(4 * whole, 4 * a.head_dim, 4):
            normed_one = simd.read_f32(a.x + place + i) * scale
            simd.write_f32(a.out + place + i, normed_one * simd.read_f32(a.weight + i))


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
        token = carray(simd.pointer(r.rows), r.n_rows, ROW)[row]
        angle = 4 * token.position * pairs
        is_long = token.seq_len >= a.long_from
        cos = carray(simd.pointer((a.long_cos if is_long else a.cos) + angle), pairs, np.float32)
        sin = carray(simd.pointer((a.long_sin if is_long else a.sin) + angle), pairs, np.float32)
        for i in range(pairs):
            u, v = x[i * a.first_step], x[i * a.first_step + a.second]
            out[i * a.first_step] = u * cos[i] - v * sin[i]
            out[i * a.first_step + a.second] = u * sin[i] + v * cos[i]
        for i in range(a.n_dims, a.head_dim):
            out[i] = x[i]


@njit(inline="always")
def _sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), lane by lane."""
    one = simd.splat(np.float32(1))
    return simd.div(one, simd.add(one, simd.exp(simd.sub(simd.splat(np.float32(0)), x))))


@njit(inline="always")
def _swiglu(gate: Any, up: Any) -> Any:
    one = simd.splat(np.float32(1))
    silu = simd.div(gate, simd.add(one, simd.exp(simd.sub(simd.splat(np.float32(0)), gate))))
    return simd.mul(silu, up)


@njit(inline="always")
def _geglu(gate: Any, up: Any) -> Any:
    cubic = simd.fma(simd.mul(gate, gate), simd.splat(np.float32(0.044715)), simd.splat(np.float32(1)))
    inner = simd.mul(simd.mul(simd.splat(np.float32(2 * math.sqrt(2 / math.pi))), gate), cubic)
    return simd.mul(simd.mul(gate, _sigmoid(inner)), up)  # (1 + tanh(x)) / 2 = sigmoid(2 x)


@njit(inline="always")
def _swiglu_oai(gate: Any, up: Any) -> Any:
    limit = simd.splat(np.float32(7))
    gate = simd.minimum(gate, limit)
    up = simd.maximum(simd.minimum(up, limit), simd.splat(np.float32(-7)))
    silu = simd.mul(gate, _sigmoid(simd.mul(gate, simd.splat(np.float32(1.702)))))
    return simd.mul(silu, simd.add(up, simd.splat(np.float32(1))))


ACTIVATIONS = ("swiglu", "geglu", "swiglu_oai")


@functools.cache
def gated(activation: str) -> Kernel:
    """The kernel of out = activation(gate, up), 32 elements a unit of work."""
    number = ACTIVATIONS.index(activation)

    def gated(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, GATED)[0], carray(simd.pointer(run), 1, RUN)[0]
        first_row, n_rows = rows_of(r, a.slots)
        first, last = share(n_rows * a.n_blocks, thread, n_threads)
        for unit in range(first, last):
            start = (first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
            for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
                gate, up = simd.load(a.gate + place), simd.load(a.up + place)
                if number == 0:
                    simd.store(a.out + place, _swiglu(gate, up))
                elif number == 1:
                    simd.store(a.out + place, _geglu(gate, up))
                else:
                    simd.store(a.out + place, _swiglu_oai(gate, up))

    return Kernel(gated, f"_{activation}")


@kernel
def sigmoid_gate(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = x * sigmoid(gate), one gate a row; 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, SIGMOID_GATE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_blocks, thread, n_threads)
    for unit in range(first, last):
        row = r.first_row + unit // a.n_blocks
        share_of_x = _sigmoid(simd.splat(simd.read_f32(a.gate + row * a.gate_stride)))
        start = row * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            simd.store(a.out + place, simd.mul(simd.load(a.x + place), share_of_x))


@kernel
def scale(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = x * factor, 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, SCALE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_blocks, thread, n_threads)
    for unit in range(first, last):
        start = (r.first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            simd.store(a.out + place, simd.mul(simd.load(a.x + place), simd.splat(a.factor)))


@kernel
def softcap(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = factor * tanh(x / factor), 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, SCALE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_blocks, thread, n_threads)
    for unit in range(first, last):
        start = (r.first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            simd.store(a.out + place, capped(simd.load(a.x + place), a.factor))


@njit(inline="always")
def capped(x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap), lane by lane."""
    one, doubled = simd.splat(np.float32(1)), simd.splat(np.float32(2) / cap)
    rest = simd.div(simd.splat(np.float32(2)), simd.add(simd.exp(simd.mul(x, doubled)), one))
    return simd.mul(simd.splat(cap), simd.sub(one, rest))  # tanh(x) = 1 - 2 / (e^2x + 1)


@kernel
def columns(args: int, run: int, thread: int, n_threads: int) -> None:
    """Copy `width` columns, x being where they begin; a row a unit of work."""
    a, r = carray(simd.pointer(args), 1, COLUMNS)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share(r.n_rows - r.first_row, thread, n_threads)
    for row in range(r.first_row + first, r.first_row + last):
        x = carray(simd.pointer(a.x + row * a.x_stride), a.width, np.float32)
        out = carray(simd.pointer(a.out + row * a.out_stride), a.width, np.float32)
        for i in range(a.width):
            out[i] = x[i]


@kernel
def add(args: int, run: int, thread: int, n_threads: int) -> None:
    """out = a + b, 32 elements a unit of work."""
    a, r = carray(simd.pointer(args), 1, ADD)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share((r.n_rows - r.first_row) * a.n_blocks, thread, n_threads)
    for unit in range(first, last):
        start = (r.first_row + unit // a.n_blocks) * a.stride + 4 * ACTIVATION_BLOCK * (unit % a.n_blocks)
        for place in range(start, start + 4 * ACTIVATION_BLOCK, 4 * _LANES):
            simd.store(a.out + place, simd.add(simd.load(a.a + place), simd.load(a.b + place)))

"""Rounding of activations to the forms that matrix products take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, intrinsic, types
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, BLOCK_BYTES, CODE_BIAS, RUN, START, record
from llamacli.kernels.work import rows_of, share

ROUND = record("x", "x_stride", "out", "out_stride", "width", "by_row", "slots")

_OFFSETS = {name: field[1] for name, field in ACTIVATION.fields.items()}  # type: ignore[union-attr]
_ITEM = ACTIVATION.itemsize
_TINY, _LARGEST_HALF = 1e-30, 65504.0
_LANES = ir.LANES


def _store_block(b: ir.Builder, out: ir.Value, integers: list[ir.Value], scale: ir.Value) -> None:
    """Store an ACTIVATION block; `integers` are two vectors of 16 int32."""
    for integer, start in zip(integers, (0, _LANES), strict=True):
        ir.store(b, ir.offset(b, out, start), b.trunc(integer, ir.I8X16))
    ir.store(b, ir.offset(b, out, _OFFSETS["scale"]), scale)
    total = ir.sum_i32(b, b.add(*integers))
    ir.store(b, ir.offset(b, out, _OFFSETS["sum"]), b.sitofp(total, ir.F32))
    for name, part in (("start", total), ("start_half", ir.sum_i32(b, integers[0]))):
        ir.store(b, ir.offset(b, out, _OFFSETS[name]), b.sub(ir.I32(START), b.mul(part, ir.I32(CODE_BIAS))))


def _load_block(b: ir.Builder, x: ir.Value) -> list[ir.Value]:
    return [ir.load(b, ir.offset(b, x, start), ir.F32X16) for start in (0, 4 * _LANES)]


def _quantize_q8_0(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Quantize 32 float32 to a Q8_0 block.

    scale = largest magnitude / 127; integers are rounded to nearest, ties to even. The scale is rounded to float16
    after the integers are taken, unless it is too large for that. Blocks that hold only numbers below 1e-30 become
    zero: the inverse of their scale would overflow.
    """
    halves = _load_block(b, x)
    largest = ir.max_f32(b, ir.maximum(b, ir.absolute(b, halves[0]), ir.absolute(b, halves[1])))
    scale = b.fdiv(largest, ir.F32(127))
    inverse = b.select(b.fcmp_ordered(">", largest, ir.F32(_TINY)), b.fdiv(ir.F32(127), largest), ir.F32(0))
    integers = [ir.round_i32(b, b.fmul(half, ir.splat(b, inverse))) for half in halves]
    rounded = b.fpext(b.fptrunc(scale, ir.HALF), ir.F32)
    _store_block(b, out, integers, b.select(b.fcmp_ordered("<", scale, ir.F32(_LARGEST_HALF)), rounded, scale))


def _quantize_q8_k(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Quantize 256 float32 to eight Q8_K blocks; the extreme becomes -127."""
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


def _nearest_f16(b: ir.Builder, x: ir.Value) -> list[ir.Value]:
    """Nearest finite float16 of 32 float32, as two vectors of float32."""
    rounded = []
    for vector in _load_block(b, x):
        bounded = ir.minimum(b, vector, ir.constant(ir.F32X16, _LARGEST_HALF))
        bounded = ir.maximum(b, bounded, ir.constant(ir.F32X16, -_LARGEST_HALF))
        rounded.append(ir.round_f16(b, bounded))
    return rounded


def _nearest_bf16(b: ir.Builder, x: ir.Value) -> list[ir.Value]:
    """Nearest bfloat16 of 32 finite float32, ties to even.

    Two vectors of int32; the upper halves of their lanes are the results, the lower ones are left over.
    """
    rounded = []
    for vector in _load_block(b, x):
        bits = b.bitcast(vector, ir.I32X16)
        odd = b.and_(b.lshr(bits, ir.constant(ir.I32X16, 16)), ir.constant(ir.I32X16, 1))
        rounded.append(b.add(bits, b.add(odd, ir.constant(ir.I32X16, 0x7FFF))))
    return rounded


def _round_f16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Round 32 float32 to finite float16, kept as float32."""
    for vector, start in zip(_nearest_f16(b, x), (0, 4 * _LANES), strict=True):
        ir.store(b, ir.offset(b, out, start), vector)


def _split_f16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Round 32 float32 to finite float16, kept as sums of two bfloat16."""
    first, second = _nearest_f16(b, x)
    even, odd = (ir.shuffle(b, first, second, list(range(start, 2 * _LANES, 2))) for start in (0, 1))
    for half, start in zip(ir.split_bf16(b, even, odd), (0, 2 * ACTIVATION_BLOCK), strict=True):
        ir.store(b, ir.offset(b, out, start), half)


def _round_bf16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Round 32 finite float32 to bfloat16, kept as float32."""
    for bits, start in zip(_nearest_bf16(b, x), (0, 4 * _LANES), strict=True):
        ir.store(b, ir.offset(b, out, start), b.bitcast(b.and_(bits, ir.constant(ir.I32X16, -65536)), ir.F32X16))


def _pack_bf16(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Round 32 finite float32 to bfloat16."""
    for bits, start in zip(_nearest_bf16(b, x), (0, 2 * _LANES), strict=True):
        halves = b.trunc(b.lshr(bits, ir.constant(ir.I32X16, 16)), ir.ir.VectorType(ir.I16, _LANES))
        ir.store(b, ir.offset(b, out, start), halves)


@attrs.frozen
class Form:
    """Activation format: unit width and rounding code.

    `convert` emits the rounding of `width` numbers to `item_bytes` bytes.
    """

    width: int
    item_bytes: int
    convert: Callable[[ir.Builder, ir.Value, ir.Value], None]


FORMS = {
    "f16": Form(ACTIVATION_BLOCK, BLOCK_BYTES["f16"], _round_f16),
    "f16_split": Form(ACTIVATION_BLOCK, BLOCK_BYTES["f16_split"], _split_f16),
    "bf16": Form(ACTIVATION_BLOCK, BLOCK_BYTES["bf16"], _round_bf16),
    "bf16_pairs": Form(ACTIVATION_BLOCK, BLOCK_BYTES["bf16_pairs"], _pack_bf16),
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
    """Kernel that rounds activations to a form.

    Unit of work: a row if `by_row`, else the numbers that share a scale.
    """
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
        row, i = first_row + first // n_units, first % n_units
        for _ in range(first, last):
            _convert(number, a.x + row * a.x_stride + 4 * width * i, a.out + row * a.out_stride + item_bytes * i)
            i += 1
            if i == n_units:
                row, i = row + 1, 0

    return Kernel(round_activations, f"_{form}")

"""Matrix products: packed weights times activations."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray
from numba.core import types
from numba.extending import intrinsic

from llamacli.kernels import ir, simd
from llamacli.kernels.elementwise import share
from llamacli.kernels.formats import ACTIVATION, ACTIVATION_BLOCK, INTEGER_FORMS, ROWS, Group, Packing, packings
from llamacli.kernels.jit import RUN, Kernel, record
from llamacli.quantization import TensorType

LINEAR = record(
    "weight", "tile_bytes", "n_tiles", "n_blocks", "x", "x_stride", "out", "out_stride", "bias", "residual", "n_groups",
    "starts",
)  # fmt: skip
"""`weight` in tiles, times `x`, rows `x_stride` bytes apart, each of n_blocks blocks of the weight's format; `bias` is
float32 [n_tiles * 16]; `residual`, which may be 0, lies like `out` and is added to it.
With `starts`, int64 [n_groups + 1], there are n_groups weights one after another, and group i's is multiplied by rows
starts[i] to starts[i + 1] - 1."""

WIDE, NARROW = 16, 4
"""Tokens that a register tile spans: as many as registers hold, fewer for what is left over, and one at a time."""

_CHUNK = 128
"""Tokens whose activations are kept in the second-level cache while the weights pass by."""

_i64 = types.int64


@intrinsic(prefer_literal=True)
def _tile(typingctx: Any, kind: Any, n: Any, weight: Any, n_blocks: Any, x: Any, x_stride: Any, out: Any,
          out_stride: Any, bias: Any, residual: Any) -> Any:  # fmt: skip
    """One tile of 16 rows times n tokens; kind and n are literals, all else int64. The order of every sum is fixed."""
    if not isinstance(kind, types.IntegerLiteral) or not isinstance(n, types.IntegerLiteral):
        return None
    packing, n_tokens = packings()[TensorType(kind.literal_value)], n.literal_value
    multiply = _integer_block if packing.activation in INTEGER_FORMS else _float_block

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, weight, n_blocks, x, x_stride, out, out_stride, bias, residual = args
        rows = [b.add(x, b.mul(x_stride, ir.I64(token))) for token in range(n_tokens)]

        def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            block = packing.load(b, b.add(weight, b.mul(i, ir.I64(packing.n_bytes))))
            return multiply(b, packing, block, i, rows, totals)

        totals = ir.loop(b, n_blocks, [ir.constant(ir.F32X16, 0.0)] * n_tokens, body)
        biases = ir.load(b, bias, ir.F32X16)
        totals = [b.fadd(total, biases) for total in totals]
        places = [b.mul(out_stride, ir.I64(token)) for token in range(n_tokens)]
        with b.if_else(b.icmp_signed("==", residual, ir.I64(0))) as (alone, added):
            with alone:
                for place, total in zip(places, totals, strict=True):
                    ir.store(b, b.add(out, place), total)
            with added:
                for place, total in zip(places, totals, strict=True):
                    ir.store(b, b.add(out, place), b.fadd(ir.load(b, b.add(residual, place), ir.F32X16), total))
        return context.get_dummy_value()

    return types.void(kind, n, *[_i64] * 8), codegen


def _float_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    start = b.mul(i, ir.I64(4 * packing.block))
    for column, weights in enumerate(block):
        for token, row in enumerate(rows):
            x = ir.broadcast_f32(b, ir.offset(b, b.add(row, start), 4 * column))
            totals[token] = ir.fma(b, weights, x, totals[token])
    return totals


def _integer_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    size = ACTIVATION.itemsize
    start = b.mul(i, ir.I64(size * packing.block // ACTIVATION_BLOCK))
    for g, group in enumerate(block):
        for token, row in enumerate(rows):
            x = ir.offset(b, b.add(row, start), g * size)
            totals[token] = _integer_group(b, group, x, totals[token])
    return totals


def _integer_group(b: ir.Builder, group: Group, x: ir.Value, total: ir.Value) -> ir.Value:
    """total + the product of 32 columns of weights with one block of activations."""
    offsets = {name: field[1] for name, field in ACTIVATION.fields.items()}  # type: ignore[union-attr]
    x_scale = ir.broadcast_f32(b, ir.offset(b, x, offsets["scale"]))
    minus_sums = [ir.broadcast_i32(b, ir.offset(b, x, offsets["minus_sum"]))]
    if len(group.terms) == 2:
        minus_half = ir.broadcast_i32(b, ir.offset(b, x, offsets["minus_half"]))
        minus_sums = [minus_half, b.sub(minus_sums[0], minus_half)]
    none = ir.constant(ir.I32X16, 0)
    for part, ((scale, shift), minus_sum) in enumerate(zip(group.terms, minus_sums, strict=True)):
        # Two chains, since one would wait for the latency of each dot product; integers make the order irrelevant.
        sums = [none if group.bias_bits is None else ir.shift_left(b, minus_sum, group.bias_bits), none]
        n = len(group.codes) // len(group.terms)
        for i, codes in enumerate(group.codes[part * n : (part + 1) * n]):
            repeated = b.bitcast(ir.broadcast_i32(b, ir.offset(b, x, 4 * (part * n + i))), ir.I8X64)
            sums[i % 2] = ir.dot_u8s8(b, sums[i % 2], codes, repeated)
        total = ir.fma(b, b.fmul(ir.to_f32(b, b.add(*sums)), scale), x_scale, total)
        if shift is not None:
            sum_x = b.fmul(ir.to_f32(b, b.sub(none, minus_sum)), x_scale)
            total = ir.fma(b, shift, sum_x, total)
    return total


@functools.cache
def linear(kind: TensorType) -> Kernel:
    """The kernel of weights packed as `kind`."""
    number = int(kind)

    def linear(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LINEAR)[0], carray(simd.pointer(run), 1, RUN)[0]
        first, last = share(a.n_tiles, thread, n_threads)
        for group in range(a.n_groups):
            row, end = r.first_row, r.n_rows
            if a.starts:
                row, end = simd.read_i64(a.starts + 8 * group), simd.read_i64(a.starts + 8 * group + 8)
            while row < end:
                chunk_end = min(row + _CHUNK, end)
                for t in range(first, last):
                    weight = a.weight + (group * a.n_tiles + t) * a.tile_bytes
                    lanes = 4 * ROWS * t
                    token = row
                    while token < chunk_end:
                        x, out = a.x + token * a.x_stride, a.out + token * a.out_stride + lanes
                        residual = a.residual + token * a.out_stride + lanes if a.residual else 0
                        bias = a.bias + lanes
                        if chunk_end - token >= WIDE:
                            _tile(number, WIDE, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual)
                            token += WIDE
                        elif chunk_end - token >= NARROW:
                            _tile(number, NARROW, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual)
                            token += NARROW
                        else:
                            _tile(number, 1, weight, a.n_blocks, x, a.x_stride, out, a.out_stride, bias, residual)
                            token += 1
                row = chunk_end

    return Kernel(linear, f"_{kind.name}")

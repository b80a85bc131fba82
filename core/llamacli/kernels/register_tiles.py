"""Matrix products in registers: a tile of 16 rows of weights times some tokens.

A vector register holds the sums of 16 rows for one token. Every sum is taken in a fixed order, whatever the number of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamacli.kernels import ir
from llamacli.kernels.deferred import intrinsic, types
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, INTEGER_FORMS
from llamacli.kernels.packing_formats import Block, Group, Packing

_AHEAD = 4096
"""Prefetch distance in bytes of weights."""

_i64 = types.int64


def tile_of(packing: Packing) -> Any:
    """`emit_tile` for Numba; n is a literal, all else int64."""

    @intrinsic(prefer_literal=True)
    def tile(typingctx: Any, n: Any, weight: Any, n_blocks: Any, x: Any, x_stride: Any, out: Any, out_stride: Any,
             bias: Any, residual: Any) -> Any:  # fmt: skip
        if not isinstance(n, types.IntegerLiteral):
            return None
        n_tokens = n.literal_value

        def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
            emit_tile(b, packing, n_tokens, *args[1:])
            return context.get_dummy_value()

        return types.void(n, *[_i64] * 8), codegen

    return tile


def emit_tile(
    b: ir.Builder, packing: Packing, n_tokens: int, weight: ir.Value, n_blocks: ir.Value, x: ir.Value,
    x_stride: ir.Value, out: ir.Value, out_stride: ir.Value, bias: ir.Value, residual: ir.Value,
) -> None:  # fmt: skip
    """Emit the product of a tile of 16 rows with n tokens.

    The order of every sum is fixed.
    """
    multiply = _multiplier(packing)
    rows = [b.add(x, b.mul(x_stride, ir.I64(token))) for token in range(n_tokens)]

    def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        # Few tokens are bound by memory, and blocks are too long for the processor to look far ahead.
        address = b.add(weight, b.mul(i, ir.I64(packing.n_bytes)))
        block = packing.load(b, address, _AHEAD)
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


def _multiplier(packing: Packing) -> Callable[..., list[ir.Value]]:
    """Function that adds the products of a block."""
    if packing.activation in INTEGER_FORMS:
        return _integer_block
    return _pair_block if packing.activation == "bf16_pairs" else _float_block


def _float_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """Add the products of a block of floats.

    Of adjacent columns, the last is the first to be added, as AVX512-BF16 does.
    """
    start, column = b.mul(i, ir.I64(4 * packing.block)), 0
    for adjacent in block:
        for place, weights in reversed(list(enumerate(adjacent))):
            for token, row in enumerate(rows):
                x = ir.broadcast_f32(b, ir.offset(b, b.add(row, start), 4 * (column + place)))
                totals[token] = ir.fma(b, weights, x, totals[token])
        column += len(adjacent)
    return totals


def _pair_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """Add the products of a block of bfloat16, by pairs of columns."""
    start = b.mul(i, ir.I64(2 * packing.block))
    for pair, (weights,) in enumerate(block):
        for token, row in enumerate(rows):
            x = ir.broadcast_i32(b, ir.offset(b, b.add(row, start), 4 * pair))
            totals[token] = ir.dot_bf16(b, totals[token], weights, x)
    return totals


def _integer_block(
    b: ir.Builder, packing: Packing, block: Block, i: ir.Value, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """Add the products of a block of integers.

    Sums of integers are scaled within the block, then once multiplied by the block's factors and the activations'
    scale.
    """
    size, offsets = ACTIVATION.itemsize, {name: field[1] for name, field in ACTIVATION.fields.items()}  # type: ignore[union-attr]
    start = b.mul(i, ir.I64(size * packing.block // ACTIVATION_BLOCK))
    places = [b.add(row, start) for row in rows]
    shared = 1 if packing.activation == "q8_0" else packing.block // ACTIVATION_BLOCK
    sums: list[ir.Value | None] = []
    shifts: list[ir.Value | None] = []
    for g, group in enumerate(block.groups):
        if g % shared == 0:  # a new scale of activations
            sums, shifts = [None] * len(rows), [None] * len(rows)
        for token, place in enumerate(places):
            x = ir.offset(b, place, g * size)
            for part, (scale, shift) in enumerate(group.terms):
                n = len(group.codes) // len(group.terms)
                codes = group.codes[part * n : (part + 1) * n]
                product = _dot(b, block, codes, ir.offset(b, x, 4 * part * n), len(rows), _minus_sum(b, group, part, x))
                sums[token] = _add_scaled(b, sums[token], product, scale)
                if block.shift_factor is not None or shift is not None:
                    sum_x = ir.broadcast_f32(b, ir.offset(b, x, offsets["sum"]))
                    if len(group.terms) == 2:
                        sum_x = ir.to_f32(b, b.neg(_minus_sum(b, group, part, x)()))
                    shifted = sums if block.shift_factor is None else shifts
                    shifted[token] = _add_scaled(b, shifted[token], sum_x, shift)
        if (g + 1) % shared:
            continue
        for token, place in enumerate(places):
            x_scale = ir.broadcast_f32(b, ir.offset(b, place, (g + 1 - shared) * size + offsets["scale"]))
            product = sums[token] if block.factor is None else b.fmul(sums[token], block.factor)
            if block.shift_factor is not None:
                product = ir.fma(b, shifts[token], block.shift_factor, product)
            totals[token] = ir.fma(b, product, x_scale, totals[token])
    return totals


def _dot(
    b: ir.Builder, block: Block, codes: list[ir.Value], x: ir.Value, n_tokens: int, minus_sum: Callable[[], ir.Value]
) -> ir.Value:
    """Sum of (code - bias) * activation over some columns, as float32."""
    none = ir.constant(ir.I32X16, 0)
    bias = (0 if block.bias_bits is None else 2**block.bias_bits) - ir.dot_bias(block.code_bits)
    # A lone token would wait for the latency of each dot product, so it gets two chains; integers add in any order.
    chains = [b.mul(minus_sum(), ir.constant(ir.I32X16, bias)) if bias else none]
    chains += [none] if n_tokens == 1 else []
    for i, (code, four) in enumerate(zip(codes, ir.broadcasts_i32(b, x, len(codes)), strict=True)):
        repeated = b.bitcast(four, ir.I8X64)
        chains[i % len(chains)] = ir.dot_u8s8(b, chains[i % len(chains)], code, repeated, block.code_bits)
    return ir.to_f32(b, chains[0] if len(chains) == 1 else b.add(*chains))


def _minus_sum(b: ir.Builder, group: Group, part: int, x: ir.Value) -> Callable[[], ir.Value]:
    """Emitter of minus the sum of a group part's activations."""
    offsets = {name: field[1] for name, field in ACTIVATION.fields.items()}  # type: ignore[union-attr]

    def emit() -> ir.Value:
        if len(group.terms) == 1:
            return ir.broadcast_i32(b, ir.offset(b, x, offsets["minus_sum"]))
        first = ir.broadcast_i32(b, ir.offset(b, x, offsets["minus_half"]))
        if part == 0:
            return first
        return b.sub(ir.broadcast_i32(b, ir.offset(b, x, offsets["minus_sum"])), first)

    return emit


def _add_scaled(b: ir.Builder, total: ir.Value | None, x: ir.Value, scale: ir.Value | None) -> ir.Value:
    """total + scale * x, where None means 0 or 1."""
    if total is None:
        return x if scale is None else b.fmul(x, scale)
    return b.fadd(total, x) if scale is None else ir.fma(b, x, scale, total)

"""Register tiles of matrix products.

16 rows of weights are multiplied by some tokens. A vector register holds the sums of 16 rows for one token. Every sum
is taken in a fixed order, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamacli.kernels import ir
from llamacli.kernels.deferred import intrinsic, types
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, CODE_BIAS, INTEGER_FORMS, START, START_VALUE
from llamacli.kernels.packing_formats import Block, Group, Packing

_AHEAD = 4096
"""Prefetch distance in bytes of weights."""

_ITEM, _OFFSETS = ACTIVATION.itemsize, {name: field[1] for name, field in (ACTIVATION.fields or {}).items()}

_BIAS_BITS = CODE_BIAS.bit_length() - 1

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
    start = b.mul(i, ir.I64(_ITEM * packing.block // ACTIVATION_BLOCK))
    places = [b.add(row, start) for row in rows]
    shared = 1 if packing.activation == "q8_0" else packing.block // ACTIVATION_BLOCK
    groups: list[tuple[int, Group]] = []
    sums: list[ir.Value | None] = []
    for g, group in enumerate(block.groups):
        if g % shared == 0:  # a new scale of activations
            sums, groups = [None] * len(rows), []
        groups.append((g * _ITEM, group))
        xs = [ir.offset(b, place, g * _ITEM) for place in places]
        for part, (scale, shift) in enumerate(group.terms):
            for token, x in enumerate(xs):
                product = _dot(b, block, group, part, x, len(rows))
                if not block.is_direct:
                    product = b.fsub(product, ir.constant(ir.F32X16, START_VALUE))
                sums[token] = _add_scaled(b, sums[token], product, scale)
                if shift is not None and block.shift_factor is None:
                    shift = _scaled(b, shift, _sum_unit(group))
                    sums[token] = _add_scaled(b, sums[token], _sum(b, group, part, x), shift)
        if (g + 1) % shared:
            continue
        for token, place in enumerate(places):
            product = sums[token]
            if block.is_direct:  # without rounding: factor * START_VALUE is exact
                minus_start = b.fmul(block.factor, ir.constant(ir.F32X16, -START_VALUE))
                product = ir.fma(b, product, block.factor, minus_start)
            elif block.factor is not None:
                product = b.fmul(product, block.factor)
            if block.shift_factor is not None:  # token by token, as there are no registers for sums of all
                shifts: ir.Value | None = None
                for at, one in groups:
                    for part, (_, shift) in enumerate(one.terms):
                        shifts = _add_scaled(b, shifts, _sum(b, one, part, ir.offset(b, place, at)), shift)
                product = ir.fma(b, shifts, _scaled(b, block.shift_factor, _sum_unit(group)), product)
            x_scale = ir.broadcast_f32(b, ir.offset(b, place, (g + 1 - shared) * _ITEM + _OFFSETS["scale"]))
            totals[token] = ir.fma(b, product, x_scale, totals[token])
    return totals


def _dot(b: ir.Builder, block: Block, group: Group, part: int, x: ir.Value, n_tokens: int) -> ir.Value:
    """Dot product of a part of a group, plus START_VALUE.

    The sum of (code - bias) * activation, as float32.
    """
    n = len(group.codes) // len(group.terms)
    codes, fours = group.codes[part * n : (part + 1) * n], ir.broadcasts_i32(b, ir.offset(b, x, 4 * part * n), n)
    bias = (0 if block.bias_bits is None else 2**block.bias_bits) - ir.dot_bias(block.code_bits)
    first = ir.constant(ir.I32X16, START)
    if bias == CODE_BIAS or (bias and len(group.terms) == 2):
        first = _first(b, bias, group, part, x)
    # A lone token would wait for the latency of each dot product, so it gets two chains; integers add in any order.
    chains = [first, *([ir.constant(ir.I32X16, 0)] if n_tokens == 1 else [])]
    for i, (code, four) in enumerate(zip(codes, fours, strict=True)):
        repeated = b.bitcast(four, ir.I8X64)
        chains[i % len(chains)] = ir.dot_u8s8(b, chains[i % len(chains)], code, repeated, block.code_bits)
    total = b.bitcast(chains[0] if len(chains) == 1 else b.add(*chains), ir.F32X16)
    if bias and bias != CODE_BIAS and len(group.terms) == 1:  # exact, as all numbers are small integers
        total = ir.fma(b, ir.broadcast_f32(b, ir.offset(b, x, _OFFSETS["sum"])), ir.constant(ir.F32X16, -bias), total)
    return total


def _first(b: ir.Builder, bias: int, group: Group, part: int, x: ir.Value) -> ir.Value:
    """START minus a bias times the sum of a group part's activations."""
    start, offset = _start(b, group, part, x)
    if bias != CODE_BIAS:
        minus_sum = b.ashr(b.sub(start, ir.constant(ir.I32X16, offset)), ir.constant(ir.I32X16, _BIAS_BITS))
        start, offset = b.mul(minus_sum, ir.constant(ir.I32X16, bias)), 0
    return start if offset else b.add(start, ir.constant(ir.I32X16, START))


def _start(b: ir.Builder, group: Group, part: int, x: ir.Value) -> tuple[ir.Value, int]:
    """Start of a dot product: offset - CODE_BIAS * sum of a part's activations.

    Returns it and the offset.
    """
    if len(group.terms) == 1:
        return ir.broadcast_i32(b, ir.offset(b, x, _OFFSETS["start"])), START
    first = ir.broadcast_i32(b, ir.offset(b, x, _OFFSETS["start_half"]))
    return (b.sub(ir.broadcast_i32(b, ir.offset(b, x, _OFFSETS["start"])), first), 0) if part else (first, START)


def _sum(b: ir.Builder, group: Group, part: int, x: ir.Value) -> ir.Value:
    """Sum of a group part's activations as float32, divided by `_sum_unit`."""
    if len(group.terms) == 1:
        return ir.broadcast_f32(b, ir.offset(b, x, _OFFSETS["sum"]))
    start, offset = _start(b, group, part, x)
    if not offset:
        return ir.to_f32(b, start)
    return b.fsub(b.bitcast(start, ir.F32X16), ir.constant(ir.F32X16, START_VALUE))


def _sum_unit(group: Group) -> float:
    """Unit of `_sum`, a power of two that may be multiplied late."""
    return 1.0 if len(group.terms) == 1 else -1 / CODE_BIAS


def _add_scaled(b: ir.Builder, total: ir.Value | None, x: ir.Value, scale: ir.Value | None) -> ir.Value:
    """total + scale * x, where None means 0 or 1."""
    if total is None:
        return x if scale is None else b.fmul(x, scale)
    return b.fadd(total, x) if scale is None else ir.fma(b, x, scale, total)


def _scaled(b: ir.Builder, x: ir.Value, unit: float) -> ir.Value:
    """Product with a constant."""
    return x if unit == 1 else b.fmul(x, ir.constant(ir.F32X16, unit))

"""Register tiles of matrix products.

16 rows of weights are multiplied by some tokens. A vector register holds the sums of 16 rows for one token. Every sum
is taken in a fixed order, whatever the number of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llamacli.kernels import ir
from llamacli.kernels.deferred import intrinsic, types
from llamacli.kernels.isa import AVX512, isa
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, AHEAD, CODE_BIAS, INTEGER_FORMS, START, START_VALUE
from llamacli.kernels.packing_formats import Block, Group, Packing, Term

_STREAM_BYTES = {True: 8, False: 16}
"""Bytes of 16 weights for each token from which on products of one or two tokens are bound by memory, by AVX-512."""

_ITEM, _OFFSETS = ACTIVATION.itemsize, {name: field[1] for name, field in (ACTIVATION.fields or {}).items()}

_i64 = types.int64


def tile_of(packing: Packing) -> Any:
    """`emit_tile` for Numba; n is a literal, all else int64."""

    @intrinsic(prefer_literal=True)
    def tile(typingctx: Any, n: Any, weight: Any, n_blocks: Any, x: Any, x_stride: Any, out: Any, out_stride: Any,
             bias: Any, residual: Any, ahead: Any) -> Any:  # fmt: skip
        if not isinstance(n, types.IntegerLiteral):
            return None
        n_tokens = n.literal_value

        def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
            emit_tile(b, packing, n_tokens, *args[1:])
            return context.get_dummy_value()

        return types.void(n, *[_i64] * 9), codegen

    return tile


def is_in_stream(packing: Packing, n_tokens: int) -> bool:
    """True for products that memory alone bounds."""
    return n_tokens <= 2 and packing.n_bytes >= n_tokens * packing.block * _STREAM_BYTES[isa() in AVX512]


def emit_tile(
    b: ir.Builder, packing: Packing, n_tokens: int, weight: ir.Value, n_blocks: ir.Value, x: ir.Value,
    x_stride: ir.Value, out: ir.Value, out_stride: ir.Value, bias: ir.Value, residual: ir.Value,
    ahead: ir.Value,
) -> None:  # fmt: skip
    """Emit the product of 16 rows with n tokens, in fixed order.

    `ahead`: prefetch distance of products that memory alone bounds, in bytes of weights.
    """
    multiply = _multiplier(packing)
    ahead = ahead if is_in_stream(packing, n_tokens) else ir.I64(AHEAD)

    def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        # Few tokens are bound by memory, and blocks are too long for the processor to look far ahead.
        address = b.add(weight, b.mul(i, ir.I64(packing.n_bytes)))
        block = packing.load(b, address, b.add(address, ahead))
        return multiply(b, packing, block, i, x, x_stride, totals)

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
    if packing.activation in INTEGER_FORMS:
        return _integer_block
    return _pair_block if packing.activation == "bf16_pairs" else _float_block


def _float_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, x: ir.Value, x_stride: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Add the products of a block of floats.

    Of adjacent columns, the last is the first to be added, as AVX512-BF16 does.
    """
    places, column = _places(b, b.mul(i, ir.I64(4 * packing.block)), x, x_stride, len(totals)), 0
    for adjacent in block:
        for at, weights in reversed(list(enumerate(adjacent, start=column))):
            for token, place in enumerate(places):
                number = ir.broadcast_f32(b, ir.offset(b, place, 4 * at))
                totals[token] = ir.fma(b, weights, number, totals[token])
        column += len(adjacent)
    return totals


def _pair_block(
    b: ir.Builder, packing: Packing, block: Any, i: ir.Value, x: ir.Value, x_stride: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Add the products of a block of bfloat16, by pairs of columns."""
    places = _places(b, b.mul(i, ir.I64(2 * packing.block)), x, x_stride, len(totals))
    for pair, (weights,) in enumerate(block):
        for token, place in enumerate(places):
            numbers = ir.broadcast_i32(b, ir.offset(b, place, 4 * pair))
            totals[token] = ir.dot_bf16(b, totals[token], weights, numbers)
    return totals


def _integer_block(
    b: ir.Builder, packing: Packing, block: Block, i: ir.Value, x: ir.Value, x_stride: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Add the products of a block of integers.

    Sums of integers are scaled within the block, then once multiplied by the block's factors and the activations'
    scale. A chain of dot products runs through groups that have no scales of their own.
    """
    start, n_tokens = b.mul(i, ir.I64(_ITEM * packing.block // ACTIVATION_BLOCK)), len(totals)
    places = _places(b, start, x, x_stride, n_tokens)
    if block.pair_at is not None and block.chain == 1:
        sums = _sums_in_loop(b, block, block.pair_at, start, x, x_stride, n_tokens)
        return _add_products(b, block, places, 0, sums, [(g * _ITEM, block.terms(g)) for g in range(8)], totals)
    shared = 1 if packing.activation == "q8_0" else packing.block // ACTIVATION_BLOCK
    terms: list[tuple[int, list[Term]]] = []
    sums = []
    chains: list[list[ir.Value]] = [[] for _ in totals]
    for g, group in _in_order(b, block, n_tokens):
        if g % shared == 0:  # a new scale of activations
            sums, terms = [None] * n_tokens, []
        terms.append((g * _ITEM, group.terms))
        sums = _add_group(b, block, g, group, [ir.offset(b, place, g * _ITEM) for place in places], chains, sums)
        if (g + 1) % shared == 0:
            totals = _add_products(b, block, places, (g + 1 - shared) * _ITEM, sums, terms, totals)
    return totals


def _places(b: ir.Builder, start: ir.Value, x: ir.Value, x_stride: ir.Value, n_tokens: int) -> list[ir.Value]:
    """Addresses at `start` of the activations of n tokens.

    Each four share a register, as instructions add one stride or two at no cost: with one for each token, LLVM would
    keep most of them in memory.
    """
    n_shared = 4 if n_tokens > 2 and isa() in AVX512 else 1
    firsts = [b.add(b.add(x, b.mul(x_stride, ir.I64(i))), start) for i in range(0, n_tokens, n_shared)]
    if n_shared > 1:
        firsts = [ir.opaque(b, first) for first in firsts]
    return [b.add(firsts[i // n_shared], b.mul(x_stride, ir.I64(i % n_shared))) for i in range(n_tokens)]


def _sums_in_loop(
    b: ir.Builder, block: Block, pair_at: Callable[[ir.Value], Iterator[Group]], start: ir.Value, x: ir.Value,
    x_stride: ir.Value, n_tokens: int,
) -> list[ir.Value | None]:  # fmt: skip
    """Sum a block of eight groups, two at a time.

    Code for all would not fit into caches of decoded instructions, and LLVM would move the loads of all groups to its
    beginning.
    """

    def body(pair: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        xs = _places(b, b.add(start, b.mul(pair, ir.I64(2 * _ITEM))), x, x_stride, n_tokens)
        for group in pair_at(pair):
            sums = _add_group(b, block, 0, group, xs, [[] for _ in xs], sums)
            xs = [ir.offset(b, x, _ITEM) for x in xs]
            ir.keep_order(b)
        return sums

    return ir.loop(b, ir.I64(4), [ir.constant(ir.F32X16, 0.0)] * n_tokens, body)


def _add_group(
    b: ir.Builder, block: Block, g: int, group: Group, xs: list[ir.Value], chains: list[list[ir.Value]],
    sums: Sequence[ir.Value | None],
) -> list[ir.Value | None]:  # fmt: skip
    sums = list(sums)
    for part, (scale, _) in enumerate(group.terms):
        for token, x in enumerate(xs):
            if g % block.chain == 0:
                chains[token] = _new_chains(b, block, group, part, x, len(xs))
            _extend(b, block, group, part, x, chains[token])
            if (g + 1) % block.chain:
                continue
            product = _value(b, block, group, x, chains[token])
            sums[token] = _add_scaled(b, sums[token], product, scale)
    if block.shift_factor is None and group.terms[0][1] is not None:
        return [_add_shifts(b, total, group.terms, x) for total, x in zip(sums, xs, strict=True)]
    return sums


def _add_products(
    b: ir.Builder, block: Block, places: list[ir.Value], scale_at: int, sums: Sequence[ir.Value | None],
    terms: list[tuple[int, list[Term]]], totals: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Add sums of columns with one activation scale, times factors.

    `scale_at`: offset of that scale; `terms`: offsets of the groups' activations, and their terms.
    """
    results = []
    for place, product, total in zip(places, sums, totals, strict=True):
        if block.is_direct:  # without rounding: factor * START_VALUE is exact
            minus_start = b.fmul(block.factor, ir.constant(ir.F32X16, -START_VALUE))
            product = ir.fma(b, product, block.factor, minus_start)
        elif block.factor is not None:
            product = b.fmul(product, block.factor)
        if block.shift_factor is not None:  # token by token, as there are no registers for sums of all
            shifts: ir.Value | None = None
            for at, own in terms:
                shifts = _add_shifts(b, shifts, own, ir.offset(b, place, at))
            product = ir.fma(b, shifts, block.shift_factor, product)
        x_scale = ir.broadcast_f32(b, ir.offset(b, place, scale_at + _OFFSETS["scale"]))
        results.append(ir.fma(b, product, x_scale, total))
    return results


def _in_order(b: ir.Builder, block: Block, n_tokens: int) -> Iterator[tuple[int, Group]]:
    """Number the groups, and keep their loads apart.

    LLVM would gather the prefetches of a block in one burst, which holds up its loads. Many tokens have no registers to
    spare for the order.
    """
    for g, group in enumerate(block.groups):
        yield g, group
        if n_tokens <= 4:
            ir.keep_order(b)


def _bias(block: Block) -> int:
    return (0 if block.bias_bits is None else 2**block.bias_bits) - ir.dot_bias(block.code_bits)


def _starts_with_bias(block: Block, group: Group) -> bool:
    """True if a chain starts with what the bias takes from it.

    Else that is subtracted from the sum: an operation, but a start would have to be computed by more.
    """
    return _bias(block) == CODE_BIAS or (_bias(block) != 0 and (len(group.terms) == 2 or block.chain > 1))


def _new_chains(b: ir.Builder, block: Block, group: Group, part: int, x: ir.Value, n_tokens: int) -> list[ir.Value]:
    """Start the chains of dot products that are one sum, plus START.

    Few tokens would wait for the latency of each dot product, so they get several chains; integers add in any order.
    Chains of one group overlap with those of the next, but for a lone token.
    """
    first = ir.constant(ir.I32X16, START)
    if _starts_with_bias(block, group):
        first = ir.splat(b, _start(b, block, group, part, x))
    n_chains = max(1, min(4, (8 if block.chain > 1 else 2) // n_tokens))
    return [first, *[ir.constant(ir.I32X16, 0)] * (n_chains - 1)]


def _start(b: ir.Builder, block: Block, group: Group, part: int, x: ir.Value) -> ir.Value:
    """START minus the bias times the sum of a chain's activations, int32."""
    starts = [ir.load(b, ir.offset(b, x, g * _ITEM + _OFFSETS["start"]), ir.I32) for g in range(block.chain)]
    start, n_starts = functools.reduce(b.add, starts), block.chain  # n_starts * START - CODE_BIAS * sum
    if len(group.terms) == 2:
        half = ir.load(b, ir.offset(b, x, _OFFSETS["start_half"]), ir.I32)
        start, n_starts = (b.sub(start, half), 0) if part else (half, 1)
    if _bias(block) != CODE_BIAS:
        minus_sum = b.ashr(b.sub(start, _wrapped(n_starts * START)), ir.I32(CODE_BIAS.bit_length() - 1))
        start, n_starts = b.mul(minus_sum, ir.I32(_bias(block))), 0
    return b.add(start, _wrapped((1 - n_starts) * START))


def _wrapped(number: int) -> ir.Value:
    return ir.I32(number % 2**32)


def _extend(b: ir.Builder, block: Block, group: Group, part: int, x: ir.Value, chains: list[ir.Value]) -> None:
    n = len(group.codes) // len(group.terms)
    fours = ir.broadcasts_i32(b, ir.offset(b, x, 4 * part * n), n)
    pairs = [(code, b.bitcast(four, ir.I8X64)) for code, four in zip(group.codes[part * n :], fours, strict=False)]
    for i, chain in enumerate(chains):
        chains[i] = ir.dots_u8s8(b, chain, pairs[i :: len(chains)], block.code_bits)


def _value(b: ir.Builder, block: Block, group: Group, x: ir.Value, chains: list[ir.Value]) -> ir.Value:
    """Sum of chains as float32, plus START_VALUE where the block is direct."""
    total = b.bitcast(functools.reduce(b.add, chains), ir.F32X16)
    if not block.is_direct:
        total = b.fsub(total, ir.constant(ir.F32X16, START_VALUE))
    if _bias(block) and not _starts_with_bias(block, group):  # exact, as all numbers are small integers
        minus_bias = ir.constant(ir.F32X16, -_bias(block))
        total = ir.fma(b, ir.broadcast_f32(b, ir.offset(b, x, _OFFSETS["sum"])), minus_bias, total)
    return total


def _add_shifts(b: ir.Builder, total: ir.Value | None, terms: list[Term], x: ir.Value) -> ir.Value:
    """Add a group's shifts times the sums of its activations.

    The shift of the second half is taken for both, and that of the first, if it is another, counts from it, as
    activations have no sum of the second half.
    """
    *first, (_, last) = terms
    total = _add_scaled(b, total, ir.broadcast_f32(b, ir.offset(b, x, _OFFSETS["sum"])), last)
    for shift in (shift for _, shift in first if shift is not last):
        start = ir.broadcast_f32(b, ir.offset(b, x, _OFFSETS["start_half"]))
        sum_of_half = b.fsub(start, ir.constant(ir.F32X16, START_VALUE))  # times -CODE_BIAS
        difference = b.fmul(b.fsub(shift, last), ir.constant(ir.F32X16, -1 / CODE_BIAS))
        total = ir.fma(b, sum_of_half, difference, total)
    return total


def _add_scaled(b: ir.Builder, total: ir.Value | None, x: ir.Value, scale: ir.Value | None) -> ir.Value:
    """total + scale * x, where None means 0 or 1."""
    if total is None:
        return x if scale is None else b.fmul(x, scale)
    return b.fadd(total, x) if scale is None else ir.fma(b, x, scale, total)

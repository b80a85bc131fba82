"""Products of attention with integer keys and values.

Queries are rounded to int16, with a scale for each row, and so are the weights of a tile times the scales of values.
Products with codes are added up as int32, exactly. Rounding to 16 bits adds a
65,536th of the squared error that 8 bits have.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.attention_registers import ROW_SCORES, TILE, by_rows, scores_of_rows, sums_in_turn
from llamacli.kernels.deferred import intrinsic, njit, types
from llamacli.kernels.groups import stack_rows
from llamacli.kernels.isa import AVX512, isa
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.rounding import BLOCK
from llamacli.kernels.kv_types.types import PAGE, UNIT, IntegerType

_MOST, _LEAST = 32767.0, 1e-20
"""The largest rounded number, and a magnitude up to which numbers become 0: offsets times factors must be finite."""

_LINE, _ROW_WEIGHTS, _ROW_ENDS = 64, 2 * TILE, 8
"""Bytes of a cache line, of a row's rounded weights, and of their scale and the sum of weighted offsets."""

_PAGES, _MAX_ROWS = TILE // PAGE, 8
_i64 = types.int64
_weights_memory = stack_rows(_MAX_ROWS * (_ROW_WEIGHTS + _ROW_ENDS) // _LINE)
_scales_memory, _ahead_memory = stack_rows(2 * ROW_SCORES // _LINE), stack_rows(1)


def _magnitude(b: ir.Builder, x: ir.Value) -> ir.Value:
    """|x| as int32: greater numbers are greater, and NaN is the greatest."""
    return b.and_(b.bitcast(x, ir.I32X16), ir.constant(ir.I32X16, 0x7FFFFFFF))


def _larger(b: ir.Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _factor_and_scale(b: ir.Builder, magnitudes: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Factor that makes numbers int16, in each lane, and its inverse.

    The inverse is one number. Both are 1 where all numbers are small; the inverse is NaN unless all are finite.
    """
    largest, one = b.bitcast(ir.max_i32(b, magnitudes), ir.F32), ir.F32(1.0)
    is_large = b.fcmp_ordered(">", largest, ir.float32(_LEAST))
    is_finite = b.fcmp_ordered("<", largest, ir.F32(np.inf))
    factor = b.select(b.and_(is_large, is_finite), b.fdiv(ir.F32(_MOST), largest), one)
    scale = b.select(is_large, b.fmul(largest, ir.float32(1 / _MOST)), one)
    return ir.splat(b, factor), b.select(is_finite, scale, ir.F32(np.nan))


@ir.expose(types.void, _i64, _i64)
def _round_row(b: ir.Builder, q: ir.Value, n_vectors: ir.Value) -> None:
    """Round float32 vectors to int16 in place; their scale follows the vectors."""

    def place(i: ir.Value, size: int) -> ir.Value:
        return b.add(q, b.mul(i, ir.I64(size)))

    def find(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        return [_larger(b, _magnitude(b, ir.load(b, place(i, 4 * PAGE), ir.F32X16)), carried[0])]

    def convert(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        ir.store_i16(b, place(i, 2 * PAGE), b.fmul(ir.load(b, place(i, 4 * PAGE), ir.F32X16), factor))
        return carried

    factor, scale = _factor_and_scale(b, *ir.loop(b, n_vectors, [ir.constant(ir.I32X16, 0)], find))
    ir.loop(b, n_vectors, [], convert)
    ir.store(b, place(n_vectors, 2 * PAGE), scale)


@ir.expose(types.float32, _i64)
def _sum_of_16(b: ir.Builder, at: ir.Value) -> ir.Value:
    """Sum of 16 int16, as float32."""
    numbers = b.sext(ir.load(b, at, ir.ir.VectorType(ir.I16, ir.LANES)), ir.I32X16)
    return b.sitofp(ir.sum_i32(b, numbers), ir.F32)


@njit
def round_queries(q: Any, stride: Any) -> None:
    """Round a row of queries, float32, in place.

    It becomes int16; in the second half of its `stride` bytes, whole vectors, are its scale and, for types with
    offsets, the sum of each block of 32, all float32.
    """
    rest = q + stride // 2
    _round_row(q, stride // (4 * PAGE))
    block = rest
    for at in range(q, rest, 2 * BLOCK):
        block += 4
        total = _sum_of_16(at)
        if at + 2 * PAGE < rest:
            total += _sum_of_16(at + 2 * PAGE)
        simd.write_f32(block, total)


@ir.expose(types.void, _i64, _i64, _i64)
def _scale_weights(b: ir.Builder, p: ir.Value, scales: ir.Value, end: ir.Value) -> None:
    """Multiply a row's weights so that int16 has them times their scales.

    `scales` has the largest scale of each cell. The inverse of the factor goes to `end`.
    """
    magnitudes = [_magnitude(b, weight) for weight in _products(b, p, scales)]
    factor, scale = _factor_and_scale(b, functools.reduce(functools.partial(_larger, b), magnitudes))
    for at in range(0, ROW_SCORES, 4 * PAGE):
        place = ir.offset(b, p, at)
        ir.store(b, place, b.fmul(ir.load(b, place, ir.F32X16), factor))
    ir.store(b, end, scale)


@ir.expose(types.void, _i64, _i64, _i64)
def _round_weights(b: ir.Builder, p: ir.Value, scales: ir.Value, out: ir.Value) -> None:
    """Store a row's weights times the scales of a block, as int16."""
    for page, weight in enumerate(_products(b, p, scales)):
        ir.store_i16(b, ir.offset(b, out, 2 * PAGE * page), weight)


@ir.expose(types.void, _i64, _i64, _i64)
def _add_offsets(b: ir.Builder, p: ir.Value, offsets: ir.Value, end: ir.Value) -> None:
    """Store the sum of a block's offsets, each times its weight."""
    total = ir.sum_f32(b, functools.reduce(b.fadd, _products(b, p, offsets)))
    ir.store(b, ir.offset(b, end, 4), b.fmul(total, ir.load(b, end, ir.F32)))


def _products(b: ir.Builder, p: ir.Value, factors: ir.Value) -> list[ir.Value]:
    """A row's weights times one number each."""
    places = range(0, ROW_SCORES, 4 * PAGE)
    return [b.fmul(*(ir.load(b, ir.offset(b, start, at), ir.F32X16) for start in (p, factors))) for at in places]


@intrinsic(prefer_literal=True)
def _scores(typingctx: Any, kind: Any, n: Any, n_pages: Any, q: Any, q_stride: Any, pages: Any, keys: Any,
            head_dim: Any, out: Any, ahead: Any) -> Any:  # fmt: skip
    """Scores of n rows of queries with some pages of keys.

    Arguments are as in `attention_registers._scores`; queries are rounded by `round_queries`.
    """
    number, n_rows, n_abreast = kind.literal_value, n.literal_value, n_pages.literal_value
    stored = cells.integer_type(number)

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        for rows in _groups(n_rows):
            score_rows(b, rows, *args[3:])
        return context.get_dummy_value()

    def score_rows(b: ir.Builder, rows: range, *args: ir.Value) -> None:
        q, q_stride, pages, keys, head_dim, out, ahead = args
        starts = [q]
        while len(starts) < n_abreast:
            starts.append(ir.opaque(b, starts[-1]))
        chains = [(page, row) for page in range(n_abreast) for row in rows]
        places = [b.add(starts[page], b.mul(q_stride, ir.I64(row))) for page, row in chains]
        ends = [b.add(place, b.lshr(q_stride, ir.I64(1))) for place in places]
        parts = [b.add(ir.load(b, ir.offset(b, pages, 8 * page), ir.I64), keys) for page in range(n_abreast)]
        following = [ir.load(b, ir.offset(b, ahead, 8 * page), ir.I64) for page in range(n_abreast)]

        def add_block(i: ir.Value, totals: list[ir.Value], n_units: int) -> list[ir.Value]:
            at, n_bytes = b.mul(i, ir.I64(stored.block_bytes)), stored.header_bytes + n_units * stored.unit_bytes
            blocks = [b.add(part, at) for part in parts]
            sums = [ir.constant(ir.I32X16, 0)] * len(chains)
            lines = [(place, line) for line in range(-(-n_bytes // _LINE)) for place in following]
            for unit in range(n_units):
                first = stored.header_bytes + unit * stored.unit_bytes
                codes = [cells.key_codes(b, stored, ir.offset(b, block, first)) for block in blocks]
                for pair in range(UNIT // 2):
                    for place, line in lines[unit * UNIT // 2 + pair :: n_units * UNIT // 2] if 0 in rows else ():
                        ir.prefetch(b, b.add(place, ir.offset(b, at, line * _LINE)), 1, level=2)
                    query = b.mul(i, ir.I64(2 * BLOCK))
                    sums = [
                        ir.dot_i16(b, total, codes[page][pair], _pair(b, b.add(place, query), unit * UNIT + 2 * pair))
                        for (page, _), place, total in zip(chains, places, sums, strict=True)
                    ]
            factors, results = [cells.load_scales(b, stored, block) for block in blocks], []
            for (page, _), end, total, own in zip(chains, ends, totals, sums, strict=True):
                scale, addend = factors[page]
                result = ir.fma(b, ir.to_f32(b, own), scale, total)
                if addend is not None:
                    of_block = b.add(end, ir.offset(b, b.mul(i, ir.I64(4)), 4))
                    result = ir.fma(b, ir.broadcast_f32(b, of_block), addend, result)
                results.append(result)
            return results

        n_units = b.sdiv(b.add(head_dim, ir.I64(UNIT - 1)), ir.I64(UNIT))
        whole, rest = b.lshr(n_units, ir.I64(1)), b.and_(n_units, ir.I64(1))
        totals = [ir.constant(ir.F32X16, 0.0)] * len(chains)
        totals = ir.loop(b, whole, totals, lambda i, totals: add_block(i, totals, 2))
        totals = ir.loop(b, rest, totals, lambda _, totals: add_block(whole, totals, 1))
        for (page, row), end, total in zip(chains, ends, totals, strict=True):
            scores = cells.absolute_scores(b, number, b.fmul(total, ir.broadcast_f32(b, end)))
            ir.store(b, ir.offset(b, out, ROW_SCORES * row + 4 * PAGE * page), scores)

    return types.void(kind, n, n_pages, *[_i64] * 7), codegen


def _groups(n_rows: int) -> list[range]:
    """Rows whose sums fit the registers together."""
    most = n_rows if isa() in AVX512 else 4
    return [range(first, min(first + most, n_rows)) for first in range(0, n_rows, most)]


def _pair(b: ir.Builder, at: ir.Value, i: int) -> ir.Value:
    """Broadcast two int16, number i and the next."""
    return b.bitcast(ir.broadcast_i32(b, ir.offset(b, at, 2 * i)), ir.I16X32)


@intrinsic(prefer_literal=True)
def _largest_scales(typingctx: Any, kind: Any, part: Any, n_blocks: Any, n_cells: Any, out: Any) -> Any:
    """Store each cell's largest scale of all blocks.

    It reads one page. Cells from `n_cells` on have 0.
    """
    stored = cells.integer_type(kind.literal_value)

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, n_blocks, n_cells, out = args

        def body(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            scale, _ = cells.load_scales(b, stored, b.add(part, b.mul(i, ir.I64(stored.block_bytes))))
            return [_larger(b, _magnitude(b, scale), carried[0])]

        (largest,) = ir.loop(b, n_blocks, [ir.constant(ir.I32X16, 0)], body)
        scales = ir.first_lanes(b, b.bitcast(largest, ir.F32X16), n_cells, ir.constant(ir.F32X16, 0.0))
        ir.store(b, out, scales)
        return context.get_dummy_value()

    return types.void(kind, *[_i64] * 4), codegen


@intrinsic(prefer_literal=True)
def _load_scales(typingctx: Any, kind: Any, block: Any, n_cells: Any, out: Any) -> Any:
    """Store a block's scales of a page, and its offsets if any.

    Cells from `n_cells` on have 0.
    """
    stored = cells.integer_type(kind.literal_value)

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, block, n_cells, out = args
        none = ir.constant(ir.F32X16, 0.0)
        for i, factor in enumerate(cells.load_scales(b, stored, block)):
            if factor is not None:  # later cells may hold NaN
                ir.store(b, ir.offset(b, out, ROW_SCORES * i), ir.first_lanes(b, factor, n_cells, none))
        return context.get_dummy_value()

    return types.void(kind, _i64, _i64, _i64), codegen


@intrinsic(prefer_literal=True)
def _accumulate(typingctx: Any, kind: Any, n: Any, units: Any, pages: Any, block: Any, first: Any, n_pages: Any,
                weights: Any, ends: Any, out: Any, out_stride: Any, ahead: Any) -> Any:  # fmt: skip
    """Add some units of weighted values to n output rows.

    `pages` is the address of the table entry of the first of `n_pages` pages, `block` an offset in each, `first` the
    number of the first unit, `weights` the address of that page's rounded weights, `ends` the address of each row's
    scale and sum of offsets. As many bytes as are read are prefetched from the addresses at `ahead`. Literals: n, the
    number of units, and the type.
    """
    stored, n_rows, n_units = cells.integer_type(kind.literal_value), n.literal_value, units.literal_value
    n_bytes, n_turns = n_units * stored.block_bytes // 2, max(1, sums_in_turn(n_rows) // n_units)

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        for rows in _groups(n_rows):
            add_rows(b, rows, *args[3:])
        return context.get_dummy_value()

    def add_rows(b: ir.Builder, rows: range, *args: ir.Value) -> None:
        pages, block, first, n_pages, weights, ends, out, out_stride, ahead = args
        chains = [(unit, row) for unit in range(n_units) for row in rows]
        units = b.add(block, ir.offset(b, b.mul(first, ir.I64(stored.unit_bytes)), stored.header_bytes))
        out = b.add(out, b.mul(first, ir.I64(4 * UNIT)))

        def add_page(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            part = b.add(ir.load(b, b.add(pages, b.mul(i, ir.I64(8))), ir.I64), units)
            following = ir.load(b, b.add(ahead, b.mul(i, ir.I64(8))), ir.I64)
            following = b.add(following, b.mul(first, ir.I64(n_bytes)))
            starts = [b.add(weights, b.mul(i, ir.I64(2 * PAGE)))]
            while len(starts) < n_units:
                starts.append(ir.opaque(b, starts[-1]))
            sums = [*sums]
            for pair in range(PAGE // 2):
                for line in range(pair, -(-n_bytes // _LINE), PAGE // 2) if 0 in rows else ():
                    ir.prefetch(b, ir.offset(b, following, line * _LINE), 1, level=2)
                places = [ir.offset(b, part, unit * stored.unit_bytes) for unit in range(n_units)]
                codes = [cells.value_codes(b, stored, place, ir.I64(pair)) for place in places]
                for at, (unit, row) in enumerate(chains, start=pair % n_turns * len(chains)):
                    weight = _pair(b, ir.offset(b, starts[unit], _ROW_WEIGHTS * row), 2 * pair)
                    sums[at] = ir.dot_i16(b, sums[at], codes[unit], weight)
            return sums

        sums = ir.loop(b, n_pages, [ir.constant(ir.I32X16, 0)] * len(chains) * n_turns, add_page)
        for at, (unit, row) in enumerate(chains):
            total = functools.reduce(b.add, sums[at :: len(chains)])
            place = ir.offset(b, b.add(out, b.mul(out_stride, ir.I64(row))), 4 * UNIT * unit)
            scale = ir.broadcast_f32(b, ir.offset(b, ends, _ROW_ENDS * row))
            result = ir.fma(b, ir.to_f32(b, total), scale, ir.load(b, place, ir.F32X16))
            if has_offsets(stored):
                result = b.fadd(result, ir.broadcast_f32(b, ir.offset(b, ends, _ROW_ENDS * row + 4)))
            ir.store(b, place, result)

    return types.void(kind, n, units, *[_i64] * 9), codegen


def has_offsets(kind: IntegerType) -> bool:
    """True if numbers of a type are scale * code + offset."""
    return kind.rounding.has_offset or kind.rounding.has_zero


def scores_of_tile(name: str) -> Any:
    """Compiled function, see `attention_registers.scores_of_tile`."""
    return scores_of_rows(cells.NUMBERS[name], _scores)


def values_of_tile(name: str) -> Any:
    """Compiled function, see `attention_registers.values_of_tile`."""
    number = cells.NUMBERS[name]
    kind = cells.integer_type(number)
    offsets, block_bytes = has_offsets(kind), kind.block_bytes

    def accumulate(n: int) -> Any:
        together = 2 if isa() in AVX512 or n < 3 else 1

        @njit
        def add_block(
            pages: Any, block: Any, n_units: Any, n_pages: Any, weights: Any, ends: Any, out: Any, out_stride: Any,
            ahead: Any,
        ) -> None:  # fmt: skip
            if together == 2 and n_units == 2:
                _accumulate(number, n, 2, pages, block, 0, n_pages, weights, ends, out, out_stride, ahead)
            else:
                for unit in range(n_units):
                    _accumulate(number, n, 1, pages, block, unit, n_pages, weights, ends, out, out_stride, ahead)

        return add_block

    add_block = by_rows(accumulate)

    @njit
    def values_of(
        n: Any, p: Any, table: Any, values: Any, n_dims: Any, out: Any, out_stride: Any, ahead: Any, begin: Any,
        n_pages: Any, n_cells: Any,
    ) -> None:  # fmt: skip
        scales, weights, following = _scales_memory(), _weights_memory(), _ahead_memory()
        ends, zero = weights + _MAX_ROWS * _ROW_WEIGHTS, simd.splat(np.float32(0))
        for page in range(_PAGES):
            if page < begin or page >= n_pages:
                at = 4 * PAGE * page
                for row in range(n):
                    simd.store(p + ROW_SCORES * row + at, zero)
                simd.store(scales + at, zero)
                simd.store(scales + ROW_SCORES + at, zero)
        n_units, block = -(-n_dims // UNIT), values
        for page in range(begin, n_pages):
            place = simd.read_i64(table + 8 * page) + values
            _largest_scales(number, place, (n_units + 1) // 2, n_cells - page * PAGE, scales + 4 * PAGE * page)
        for row in range(n):
            _scale_weights(p + ROW_SCORES * row, scales, ends + _ROW_ENDS * row)
        for unit in range(0, n_units, 2):
            for page in range(begin, n_pages):
                place = simd.read_i64(table + 8 * page) + block
                _load_scales(number, place, n_cells - page * PAGE, scales + 4 * PAGE * page)
                simd.write_i64(following + 8 * page, simd.read_i64(ahead + 8 * page) + block - values)
            for row in range(n):
                own = p + ROW_SCORES * row
                _round_weights(own, scales, weights + _ROW_WEIGHTS * row)
                if offsets:
                    _add_offsets(own, scales + ROW_SCORES, ends + _ROW_ENDS * row)
            add_block(
                n, table + 8 * begin, block, min(n_units - unit, 2), n_pages - begin, weights + 2 * PAGE * begin, ends,
                out + 4 * UNIT * unit, out_stride, following + 8 * begin,
            )  # fmt: skip
            block += block_bytes

    return values_of

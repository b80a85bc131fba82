"""Products of attention by AMX, for prompts: tiles of bfloat16.

The keys and values of a tile of positions are converted once for all rows of queries that share them. Queries, keys,
values and weights are rounded to the nearest bfloat16, a tie to even; sums are float32. They run along a head's numbers
and along the positions as `llamacli.kernels.tiles` says, so that a row's result depends on no other row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.attention_registers import LOWEST, ROW_SCORES, TILE, to_absolute_scores
from llamacli.kernels.deferred import intrinsic, njit, types
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, UNIT, IntegerType
from llamacli.kernels.tiles import LINE, load_tile, store_tile, tile_instruction
from llamacli.kernels.tiles import TILE as TILE_BYTES

ROWS = 16
"""Rows of queries of a tile."""

_PAGES, _DIMS, _POSITIONS = TILE // PAGE, 32, 2
"""Pages of a tile of positions, numbers of a head in a line, and tiles of AMX for the positions."""

_i64 = types.int64


def padded(head_dim: int) -> int:
    """Numbers of a row of queries: whole lines."""
    return -(-head_dim // _DIMS) * _DIMS


# --- conversion ------------------------------------------------------------------------------------------------------
@ir.expose(types.void, _i64, _i64)
def round_line(b: ir.Builder, x: ir.Value, out: ir.Value) -> None:
    """Round 32 float32 to bfloat16; they may be in the same place."""
    low, high = (ir.load(b, ir.offset(b, x, at), ir.F32X16) for at in (0, LINE))
    ir.store(b, out, ir.round_bf16(b, low, high))


def _pairs(b: ir.Builder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """A line of bfloat16: even ones and odd ones in turns."""
    rounded = ir.round_bf16(b, even, odd)
    turns = ir.lane_numbers(*(half * ir.LANES + lane for lane in range(ir.LANES) for half in (0, 1)))
    return b.shuffle_vector(rounded, rounded, turns)


@ir.expose(types.void, _i64)
def _clear_line(b: ir.Builder, out: ir.Value) -> None:
    ir.store(b, out, ir.constant(ir.F32X16, 0.0))


@intrinsic(prefer_literal=True)
def _round_keys(typingctx: Any, kind: Any, part: Any, i: Any, head_dim: Any, out: Any) -> Any:
    """Round some dimensions of a page's keys.

    A line has two of them. They are the two from 2 * i on, or of integers those of unit i. The literal is the type.
    """
    number = kind.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, i, head_dim, out = args
        if cells.dims_at_once(number) == 1:
            first = b.mul(i, ir.I64(2))
            second = b.add(first, ir.I64(1))
            exists = b.icmp_signed("<", second, head_dim)
            (even,) = cells.load_keys(b, number, part, first)
            (odd,) = cells.load_keys(b, number, part, b.select(exists, second, first))
            keys = [even, b.select(exists, odd, ir.constant(ir.F32X16, 0.0))]
        else:
            keys = cells.load_keys(b, number, part, i)
        for line in range(len(keys) // 2):
            ir.store(b, ir.offset(b, out, line * LINE), _pairs(b, *keys[2 * line : 2 * line + 2]))
        return context.get_dummy_value()

    return types.void(kind, *[_i64] * 4), codegen


@intrinsic(prefer_literal=True)
def _round_values(typingctx: Any, kind: Any, part: Any, column: Any, n_cells: Any, head_dim: Any, out: Any) -> Any:
    """Round 16 columns of a page's values, a line for two cells.

    Cells from `n_cells` on become 0: they may hold NaN. The literal is the values' type.
    """
    number = kind.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, column, n_cells, head_dim, out = args
        load, none = cells.value_loader(b, number, part, column, head_dim), ir.constant(ir.F32X16, 0.0)

        def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            first = b.mul(i, ir.I64(2))
            pair = [
                b.select(b.icmp_signed("<", cell, n_cells), value, none)
                for cell, value in zip((first, b.add(first, ir.I64(1))), load(i), strict=True)
            ]
            ir.store(b, b.add(out, b.mul(i, ir.I64(LINE))), _pairs(b, *pair))
            return []

        ir.loop(b, ir.I64(PAGE // 2), [], body)
        return context.get_dummy_value()

    return types.void(kind, *[_i64] * 5), codegen


def rounded_tile(k: str, v: str) -> Any:
    """Compiled function that converts a tile's keys and values.

    `table` is the address of the tile's page table, `keys` and `values` offsets in each page. Of the tile's pages those
    from `begin` on are read, and of its cells the first `n_cells`; the others become 0. `to_keys` are tiles of AMX by
    numbers of a head and page, `to_values` by column and half of the positions.
    """
    k_type, v_type = cells.NUMBERS[k], cells.NUMBERS[v]
    dims = UNIT if isinstance(KV_TYPES[k], IntegerType) else 2
    lines, page_lines = _DIMS // 2, PAGE // 2

    @njit
    def convert(
        table: Any, keys: Any, values: Any, begin: Any, n_cells: Any, head_dim: Any, value_dim: Any, to_keys: Any,
        to_values: Any,
    ) -> None:  # fmt: skip
        n_blocks = -(-head_dim // _DIMS)
        for page in range(_PAGES):
            stored, left, done = np.int64(0), n_cells - page * PAGE if page >= begin else 0, 0
            if left > 0:
                stored = simd.read_i64(table + 8 * page)
                for i in range(-(-head_dim // dims)):
                    line = i * dims // 2
                    at = (line // lines * _PAGES + page) * TILE_BYTES + line % lines * LINE
                    _round_keys(k_type, stored + keys, i, head_dim, to_keys + at)
                done = -(-head_dim // dims) * dims // 2
            for line in range(done, n_blocks * lines):
                _clear_line(to_keys + (line // lines * _PAGES + page) * TILE_BYTES + line % lines * LINE)
            target = to_values + page * page_lines * LINE
            for column in range(0, value_dim, PAGE):
                if left > 0:
                    _round_values(v_type, stored + values, column, left, value_dim, target)
                else:
                    for line in range(page_lines):
                        _clear_line(target + line * LINE)
                target += _POSITIONS * TILE_BYTES

    return convert


# --- products --------------------------------------------------------------------------------------------------------
_FACTORS, _WEIGHTS = (6, 7), (4, 5)
"""Tiles of rows and of keys or values; sums have the first ones."""


@ir.expose(types.void, *[_i64] * 5)
def _multiply_keys(
    b: ir.Builder, q: ir.Value, q_stride: ir.Value, keys: ir.Value, n_blocks: ir.Value, out: ir.Value
) -> None:
    """Scores of 16 rows of queries with a tile's keys."""
    for page in range(_PAGES):
        tile_instruction(b, "tilezero", page)

    def body(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        block = b.add(keys, b.mul(k, ir.I64(_PAGES * TILE_BYTES)))
        load_tile(b, _FACTORS[0], b.add(q, b.mul(k, ir.I64(LINE))), q_stride)
        for page in range(_PAGES):
            weight = _WEIGHTS[page % 2]
            load_tile(b, weight, ir.offset(b, block, page * TILE_BYTES), ir.I64(LINE))
            tile_instruction(b, "tdpbf16ps", page, _FACTORS[0], weight)
        return []

    ir.loop(b, n_blocks, [], body)
    for page in range(_PAGES):
        store_tile(b, page, ir.offset(b, out, page * LINE), ir.I64(ROW_SCORES))


def _multiply_values(n: int) -> Any:
    """Function that adds n tiles of columns of weighted values."""

    def multiply(b: ir.Builder, p: ir.Value, values: ir.Value, out: ir.Value, out_stride: ir.Value) -> None:
        for column in range(n):
            load_tile(b, column, ir.offset(b, out, column * LINE), out_stride)
        for part in range(_POSITIONS):
            load_tile(b, _FACTORS[part], ir.offset(b, p, part * LINE), ir.I64(ROW_SCORES))
            for column in range(n):
                at = ir.offset(b, values, (column * _POSITIONS + part) * TILE_BYTES)
                load_tile(b, _WEIGHTS[column % 2], at, ir.I64(LINE))
                tile_instruction(b, "tdpbf16ps", column, _FACTORS[part], _WEIGHTS[column % 2])
        for column in range(n):
            store_tile(b, column, ir.offset(b, out, column * LINE), out_stride)

    return ir.expose(types.void, *[_i64] * 4)(multiply)


_multiply_1, _multiply_4 = (_multiply_values(n) for n in (1, 4))


def scores_of_tile(k: str) -> Any:
    """Compiled function of scores with a tile's keys: n rows of 16."""
    number, is_stored = cells.NUMBERS[k], isinstance(KV_TYPES[k], IntegerType)

    @njit
    def scores(n: Any, q: Any, q_stride: Any, keys: Any, head_dim: Any, out: Any) -> None:
        _multiply_keys(q, q_stride, keys, -(-head_dim // _DIMS), out)
        if is_stored:
            for at in range(out, out + n * ROW_SCORES, LINE):
                to_absolute_scores(number, at)

    return scores


@njit
def add_values(p: Any, values: Any, n_dims: Any, out: Any, out_stride: Any) -> None:
    """Add a tile's values to 16 rows of sums."""
    column, n_columns = 0, -(-n_dims // PAGE)
    while column + 4 <= n_columns:
        _multiply_4(p, values + column * _POSITIONS * TILE_BYTES, out + column * LINE, out_stride)
        column += 4
    while column < n_columns:
        _multiply_1(p, values + column * _POSITIONS * TILE_BYTES, out + column * LINE, out_stride)
        column += 1


# --- weights ---------------------------------------------------------------------------------------------------------
_LOG2E, _LEAST = 1.4426950408889634, -125.0
_EXP2 = (0.0095701, 0.05591786, 0.24024745, 0.69312181, 0.99999926)
"""Coefficients of 2^x for |x| <= 1/2, within 2.6e-6: weights become bfloat16."""


def _exp2(b: ir.Builder, x: ir.Value) -> ir.Value:
    """2^x for x up to 0; 0 below -125.

    A result that underflows would take the CPU about 150 cycles.
    """
    n = ir.rint(b, x)
    rest = b.fsub(x, n)
    result: ir.Value = ir.constant(ir.F32X16, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = ir.fma(b, result, rest, ir.constant(ir.F32X16, coefficient))
    usual = b.bitcast(b.fcmp_ordered(">", x, ir.constant(ir.F32X16, _LEAST)), ir.I16)
    none, nearest = ir.constant(ir.F32X16, 0.0), ir.I32(4)
    return ir.call(b, "llvm.x86.avx512.mask.scalef.ps.512", ir.F32X16, result, n, none, usual, nearest)


@ir.expose(types.void, *[_i64] * 6)
def weigh(
    b: ir.Builder, scores: ir.Value, maxima: ir.Value, totals: ir.Value, sums: ir.Value, stride: ir.Value,
    n_columns: ir.Value,
) -> None:  # fmt: skip
    """Replace scores of 16 rows by their weights in bfloat16: online softmax.

    `maxima` and `totals` are float32 [16], the largest score and the sum of weights of each row so far; `sums`, rows of
    n_columns vectors, are rescaled to a new maximum. A score of `LOWEST` has the weight 0.
    """
    rows = [ir.offset(b, scores, ROW_SCORES * row) for row in range(ROWS)]

    def load(row: int) -> list[ir.Value]:
        return [ir.load(b, ir.offset(b, rows[row], LINE * page), ir.F32X16) for page in range(_PAGES)]

    highest = [functools.reduce(functools.partial(ir.maximum, b), load(row)) for row in range(ROWS)]
    old = ir.load(b, maxima, ir.F32X16)
    new = ir.maximum(b, ir.reduce_rows(b, highest, functools.partial(ir.maximum, b)), old)
    ir.store(b, maxima, new)
    is_seen = b.fcmp_ordered(">", new, ir.constant(ir.F32X16, LOWEST))
    base = b.select(is_seen, new, ir.constant(ir.F32X16, 0.0))
    log2e = ir.constant(ir.F32X16, _LOG2E)
    is_larger = b.fcmp_ordered(">", new, old)
    one = ir.constant(ir.F32X16, 1.0)  # exactly, so that a row is the same without a tile that it does not see
    factor = b.select(is_larger, _exp2(b, b.fmul(b.fsub(old, base), log2e)), one)
    memory = ir.stack(b, 2 * LINE)
    ir.store(b, memory, b.fmul(base, ir.constant(ir.F32X16, -_LOG2E)))
    weights = []
    for row in range(ROWS):
        start = ir.broadcast_f32(b, ir.offset(b, memory, 4 * row))
        parts = [_exp2(b, ir.fma(b, score, log2e, start)) for score in load(row)]
        for half in range(_POSITIONS):
            ir.store(b, ir.offset(b, rows[row], half * LINE), ir.round_bf16(b, *parts[2 * half : 2 * half + 2]))
        weights.append(functools.reduce(b.fadd, parts))
    total = ir.reduce_rows(b, weights, b.fadd)
    ir.store(b, totals, ir.fma(b, ir.load(b, totals, ir.F32X16), factor, total))
    with b.if_then(b.icmp_unsigned("!=", b.bitcast(is_larger, ir.I16), ir.I16(0))):
        ir.store(b, ir.offset(b, memory, LINE), factor)

        def rescale(row: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            own = ir.broadcast_f32(b, b.add(ir.offset(b, memory, LINE), b.mul(row, ir.I64(4))))
            place = b.add(sums, b.mul(row, stride))

            def scale(column: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                at = b.add(place, b.mul(column, ir.I64(LINE)))
                ir.store(b, at, b.fmul(ir.load(b, at, ir.F32X16), own))
                return []

            ir.loop(b, n_columns, [], scale)
            return []

        ir.loop(b, ir.I64(ROWS), [], rescale)

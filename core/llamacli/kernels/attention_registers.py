"""Products of attention in registers.

Scores of rows of queries, and weighted sums of values, both of floats; integers have `attention_integers`, but where
values are parts of keys. Keys and values are read from the pages of a KV cache; those of
the next positions are prefetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import intrinsic, njit, types
from llamacli.kernels.isa import AVX512, isa
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, UNIT, FloatType

TILE = 64
"""Positions whose keys and values are processed at once."""

ROW_SCORES = 4 * TILE
"""Bytes of a row of scores."""

LOWEST = -3.0e38
"""Score of a position that is not seen."""

_LINE = 64
_i64 = types.int64


def _with_prefetch(
    b: ir.Builder, count: ir.Value, n_bytes: int, ahead: Sequence[ir.Value], carried: list[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:  # fmt: skip
    """Emit a counted loop that prefetches as much as it reads.

    An iteration reads `n_bytes` of each of several places, as many as `ahead` has. One cache line at a time: the
    processor waits for few lines at once, and a burst would hold up its own loads.
    """
    n_lines, together = -(-n_bytes // _LINE), max(1, _LINE // n_bytes)

    def several(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        for place in ahead:
            ir.prefetch(b, b.add(place, b.mul(i, ir.I64(n_bytes * together))), _LINE * n_lines, level=2)
        for number in range(together):
            carried = body(b.add(b.mul(i, ir.I64(together)), ir.I64(number)), carried)
        return carried

    if together == 1:
        return ir.loop(b, count, carried, several)
    whole = b.sdiv(count, ir.I64(together))
    carried = ir.loop(b, whole, carried, several)
    done = b.mul(whole, ir.I64(together))
    return ir.loop(b, b.sub(count, done), carried, lambda i, carried: body(b.add(done, i), carried))


@intrinsic(prefer_literal=True)
def _scores(typingctx: Any, kind: Any, n: Any, n_pages: Any, q: Any, q_stride: Any, pages: Any, keys: Any,
            head_dim: Any, out: Any, ahead: Any) -> Any:  # fmt: skip
    """Scores of n rows of queries with some pages of keys, floats.

    Written to `out`, rows of TILE scores. Literals: n, n_pages and the keys' type. `pages` is the address of the table
    entry of the first page, `keys` an offset in each, `ahead` the address of n_pages addresses: the parts there are
    prefetched meanwhile.
    """
    number, n_rows, n_abreast = kind.literal_value, n.literal_value, n_pages.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, _, q, q_stride, pages, keys, head_dim, out, ahead = args
        starts = [q]
        while len(starts) < n_abreast:
            starts.append(ir.opaque(b, starts[-1]))
        rows = [[b.add(start, b.mul(q_stride, ir.I64(row))) for row in range(n_rows)] for start in starts]
        parts = [b.add(ir.load(b, ir.offset(b, pages, 8 * page), ir.I64), keys) for page in range(n_abreast)]
        following = [ir.load(b, ir.offset(b, ahead, 8 * page), ir.I64) for page in range(n_abreast)]

        def add_keys(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            places = [b.add(rows[page][row], b.mul(i, ir.I64(4))) for page, row in chains]
            loaded = [cells.load_keys(b, number, part, i)[0] for part in parts]
            return [
                ir.fma(b, ir.broadcast_f32(b, place), loaded[page], total)
                for (page, _), place, total in zip(chains, places, totals, strict=True)
            ]

        chains = [(page, row) for page in range(n_abreast) for row in range(n_rows)]
        zeros = [ir.constant(ir.F32X16, 0.0)] * len(chains)
        n_bytes = PAGE * cells.float_type(number).item.itemsize
        totals = _with_prefetch(b, head_dim, n_bytes, following, zeros, add_keys)
        for (page, row), total in zip(chains, totals, strict=True):
            ir.store(b, ir.offset(b, out, ROW_SCORES * row + 4 * PAGE * page), total)
        return context.get_dummy_value()

    return types.void(kind, n, n_pages, *[_i64] * 7), codegen


@intrinsic(prefer_literal=True)
def _accumulate_values(typingctx: Any, kind: Any, n: Any, n_columns: Any, p: Any, values: Any, n_cells: Any,
                       column: Any, head_dim: Any, out: Any, out_stride: Any, ahead: Any) -> Any:  # fmt: skip
    """Add a page's values, floats, weighted by probabilities, to n output rows.

    Accumulates 16 * n_columns columns of `out`, from the first `n_cells` cells of the page; row i of `p` weighs them
    for row i of `out`. As many bytes from `ahead` on are prefetched meanwhile. Literals: n, n_columns and the type.
    """
    number, n_rows, n_abreast = kind.literal_value, n.literal_value, n_columns.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, _, p, values, n_cells, column, head_dim, out, out_stride, ahead = args
        out = b.add(out, b.mul(column, ir.I64(4)))
        rows = [b.add(out, b.mul(out_stride, ir.I64(row))) for row in range(n_rows)]
        weights = [p]
        while len(weights) < n_abreast:
            weights.append(ir.opaque(b, weights[-1]))
        n_bytes = PAGE * cells.float_type(number).item.itemsize
        size = ir.I64(n_bytes // PAGE)
        first = b.add(values, b.mul(column, size))
        chains = [(i, row) for i in range(n_abreast) for row in range(n_rows)]
        places = [ir.offset(b, rows[row], 4 * PAGE * i) for i, row in chains]

        def add_cell(cell: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            at, place = b.mul(cell, ir.I64(4)), b.add(first, b.mul(cell, b.mul(head_dim, size)))
            loaded = [cells.load_value(b, number, ir.offset(b, place, i * n_bytes)) for i in range(n_abreast)]
            return [
                ir.fma(b, ir.broadcast_f32(b, ir.offset(b, b.add(weights[i], at), ROW_SCORES * row)), loaded[i], total)
                for (i, row), total in zip(chains, totals, strict=True)
            ]

        sums = [ir.load(b, place, ir.F32X16) for place in places]
        totals = _with_prefetch(b, n_cells, n_abreast * n_bytes, [ahead], sums, add_cell)
        for place, total in zip(places, totals, strict=True):
            ir.store(b, place, total)
        return context.get_dummy_value()

    return types.void(kind, n, n_columns, *[_i64] * 8), codegen


def _in_place(convert: Callable[[ir.Builder, int, ir.Value], ir.Value]) -> Any:
    """Function that converts a vector of scores or weights where it is.

    Its arguments are the number of the keys' type, a literal, and the address.
    """

    @intrinsic(prefer_literal=True)
    def converted(typingctx: Any, kind: Any, at: Any) -> Any:
        number = kind.literal_value

        def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
            ir.store(b, args[1], convert(b, number, ir.load(b, args[1], ir.F32X16)))
            return context.get_dummy_value()

        return types.void(kind, _i64), codegen

    return converted


to_absolute_scores, to_relative_weights = _in_place(cells.absolute_scores), _in_place(cells.relative_weights)
"""From scores with stored keys to those with keys, and from weights of keys to those of stored ones."""


@intrinsic(prefer_literal=True)
def _accumulate_keys(typingctx: Any, kind: Any, n: Any, p: Any, pages: Any, keys: Any, begin: Any, n_pages: Any,
           n_cells: Any, unit: Any, head_dim: Any, out: Any, out_stride: Any) -> Any:  # fmt: skip
    """Add a tile's keys, weighted by probabilities, to n output rows.

    Accumulates 16 dimensions from 16 * `unit` on; n is 1 or, for floats, 4. `pages` is the address of the tile's page
    table, `keys` an offset in each page; pages `begin` to `n_pages` - 1 are read, and of these the first `n_cells`
    cells. The sums of a row do not depend on n.
    """
    number, n_rows = kind.literal_value, n.literal_value
    step, n_dims = cells.dims_at_once(number), UNIT // n_rows

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, p, pages, keys, begin, n_pages, n_cells, unit, head_dim, out, out_stride = args
        lanes = ir.ir.Constant(ir.I32X16, list(range(PAGE)))
        none = ir.constant(ir.F32X16, 0.0)
        last_load = b.sub(b.sdiv(b.add(head_dim, ir.I64(step - 1)), ir.I64(step)), ir.I64(1))

        def load_keys(part: ir.Value, first_dim: int) -> list[ir.Value]:
            loaded: list[ir.Value] = []
            for dim in range(first_dim, first_dim + n_dims, step):
                at = b.add(b.mul(unit, ir.I64(UNIT // step)), ir.I64(dim // step))
                at = b.select(b.icmp_signed("<", at, last_load), at, last_load)  # no dimensions beyond the head
                loaded += cells.load_keys(b, number, part, at)
            return loaded

        for first_dim in range(0, UNIT, n_dims):

            def body(i: ir.Value, totals: list[ir.Value], first_dim: int = first_dim) -> list[ir.Value]:
                page = b.add(begin, i)
                part = b.add(ir.load(b, b.add(pages, b.mul(page, ir.I64(8))), ir.I64), keys)
                left = b.trunc(b.sub(n_cells, b.mul(page, ir.I64(PAGE))), ir.I32)
                stored = b.icmp_signed("<", lanes, ir.splat(b, left))
                # Cells beyond may hold NaN.
                loaded = [b.select(stored, key, none) for key in load_keys(part, first_dim)]
                at = b.add(p, b.mul(page, ir.I64(4 * PAGE)))
                weights = [ir.load(b, ir.offset(b, at, ROW_SCORES * row), ir.F32X16) for row in range(n_rows)]
                return [ir.fma(b, loaded[i % n_dims], weights[i // n_dims], total) for i, total in enumerate(totals)]

            totals = ir.loop(b, b.sub(n_pages, begin), [none] * UNIT, body)
            sums = ir.reduce_rows(b, totals, b.fadd)
            for row in range(n_rows):
                place = b.add(out, b.mul(out_stride, ir.I64(row)))
                place = b.add(place, b.add(b.mul(unit, ir.I64(4 * UNIT)), ir.I64(4 * first_dim)))
                own = ir.shuffle(b, sums, sums, list(range(row * n_dims, (row + 1) * n_dims)))
                ir.store(b, place, b.fadd(ir.load(b, place, own.type), own))
        return context.get_dummy_value()

    return types.void(kind, n, *[_i64] * 10), codegen


def sums_in_turn(n: int) -> int:
    """Pages, or vectors of values, that n rows take at once.

    Each multiplication of a sum waits for the one before, so few rows need several sums in turn: 6 of them with
    AVX-512, 4 where a sum takes two registers or more.
    """
    return max(many for many in (1, 2, 4) if many == 1 or n * many <= (6 if isa() in AVX512 else 4))


def by_rows(of: Callable[[int], Any]) -> Any:
    """Compiled function for any number of rows up to 8.

    `of` makes functions for 1, 2, 3, 4, 6 and 8 rows. The number of rows is the first argument; where no function has
    as many, one of more rows is called.
    """
    of_1, of_2, of_3, of_4, of_6, of_8 = map(of, (1, 2, 3, 4, 6, 8))

    @njit
    def chosen(n: Any, *args: Any) -> None:
        if n > 6:
            of_8(*args)
        elif n > 4:
            of_6(*args)
        elif n > 3:
            of_4(*args)
        elif n > 2:
            of_3(*args)
        elif n > 1:
            of_2(*args)
        else:
            of_1(*args)

    return chosen


def scores_of_rows(kind: int, scores_of_pages: Any) -> Any:
    """Compiled function of scores with a tile's keys, see `scores_of_tile`."""

    def of_rows(n: int) -> Any:
        many = sums_in_turn(n)

        @njit
        def scores(
            q: Any, q_stride: Any, table: Any, keys: Any, head_dim: Any, out: Any, ahead: Any, page: Any, n_pages: Any
        ) -> None:
            while page + many <= n_pages:
                at, row = 8 * page, out + 4 * PAGE * page
                scores_of_pages(kind, n, many, q, q_stride, table + at, keys, head_dim, row, ahead + at)
                page += many
            while page < n_pages:
                at, row = 8 * page, out + 4 * PAGE * page
                scores_of_pages(kind, n, 1, q, q_stride, table + at, keys, head_dim, row, ahead + at)
                page += 1

        return scores

    return by_rows(of_rows)


def scores_of_tile(name: str) -> Any:
    """Compiled function of scores with a tile's keys.

    Its arguments are `(n, q, q_stride, table, keys, head_dim, out, ahead, begin, n_pages)`: up to 8 rows of queries;
    `table` is the address of the tile's page table, `keys` an offset in each page, `ahead` the address of an address a
    page, whose bytes are prefetched; pages `begin` to `n_pages` - 1 are read.
    """
    return scores_of_rows(cells.NUMBERS[name], _scores)


def values_of_tile(name: str) -> Any:
    """Compiled function that adds a tile's weighted values to rows.

    Its arguments are `(n, p, table, values, n_dims, out, out_stride, ahead, begin, n_pages, n_cells)`: rows of weights
    `p`, at most 8, then as for scores; cells from `n_cells` on are not read, as they may hold NaN.
    """
    kind = cells.NUMBERS[name]
    n_bytes = PAGE * cells.float_type(kind).item.itemsize

    def of_rows(n: int) -> Any:
        many = sums_in_turn(n)

        @njit
        def values(p: Any, part: Any, n_cells: Any, n_dims: Any, out: Any, out_stride: Any, ahead: Any) -> None:
            column = 0
            while column + PAGE * many <= n_dims:
                place = ahead + column * n_bytes
                _accumulate_values(kind, n, many, p, part, n_cells, column, n_dims, out, out_stride, place)
                column += PAGE * many
            while column < n_dims:
                place = ahead + column * n_bytes
                _accumulate_values(kind, n, 1, p, part, n_cells, column, n_dims, out, out_stride, place)
                column += PAGE

        return values

    values_of_page = by_rows(of_rows)

    @njit
    def values_of(
        n: Any, p: Any, table: Any, values: Any, n_dims: Any, out: Any, out_stride: Any, ahead: Any, begin: Any,
        n_pages: Any, n_cells: Any,
    ) -> None:  # fmt: skip
        for page in range(begin, n_pages):
            part, following = simd.read_i64(table + 8 * page) + values, simd.read_i64(ahead + 8 * page)
            left = min(PAGE, n_cells - page * PAGE)
            values_of_page(n, p + 4 * PAGE * page, part, left, n_dims, out, out_stride, following)

    return values_of


def keys_of_tile(name: str) -> Any:
    """Compiled function that adds a tile's keys, weighted, to some rows."""
    kind = cells.NUMBERS[name]
    is_float = isinstance(KV_TYPES[name], FloatType)
    together = 4 if is_float else 1  # rows whose sums are accumulated together

    @njit
    def keys_of_rows(
        n: Any, p: Any, table: Any, keys: Any, begin: Any, n_pages: Any, n_cells: Any, n_dims: Any, head_dim: Any,
        out: Any, out_stride: Any,
    ) -> None:  # fmt: skip
        for unit in range(-(-n_dims // UNIT)):
            i = 0
            while i < n:
                weights, sums = p + ROW_SCORES * i, out + i * out_stride
                if n - i > 1 and is_float:
                    _accumulate_keys(
                        kind, together, weights, table, keys, begin, n_pages, n_cells, unit, head_dim, sums, out_stride,
                    )  # fmt: skip
                    i += together
                else:
                    _accumulate_keys(
                        kind, 1, weights, table, keys, begin, n_pages, n_cells, unit, head_dim, sums, out_stride,
                    )  # fmt: skip
                    i += 1

    return keys_of_rows

"""FlashAttention kernel over the pages of a KV cache.

For a row of queries, keys are processed in tiles of TILE positions with an online softmax (Milakov and Gimelshein 2018,
Dao et al. 2022). Tiles lie at fixed positions, so a token's result is the same bits whether it is evaluated alone or
with others. Up to MAX_QUERY_ROWS rows of queries that share a head of keys and values are processed together: the heads
of a group (GQA), and in a prompt several tokens.

Sums are taken over chunks of tiles, and those of chunks are added in order. Where there are few tokens, threads share
the chunks of their cells (Flash-Decoding, Dao et al. 2023), and the one that ends the last chunk adds them up. A thread
takes all heads of a tile before the next tile: a page of the cache has the parts of all heads one after another, and
memory is fast where it is read in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, intrinsic, njit, types
from llamacli.kernels.groups import stack_rows
from llamacli.kernels.isa import AVX512, isa
from llamacli.kernels.jit import Kernel
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.rounding import BLOCK
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, UNIT, FloatType, IntegerType, KVType
from llamacli.kernels.layout import ROW, RUN, record

STORE = record(
    "k", "k_stride", "v", "v_stride", "layer", "n_head_kv", "head_dim", "value_dim", "scratch", "scratch_stride"
)
"""`v` is 0 where values are parts of keys."""

ATTENTION = record(
    "q", "q_stride", "out", "out_stride", "layer", "n_head_kv", "group", "head_dim", "value_dim", "scratch",
    "scratch_stride", "window", "chunk", "n_after", "sinks", "slopes", "bias", "max_distance", "cross", "firsts",
    "firsts_stride", "partials", "partial_bytes", scale=np.float32, softcap=np.float32,
)  # fmt: skip
"""`group` heads of queries share a head of keys and values; `scratch` is `scratch_stride` bytes for each thread.
A token sees `window` positions, its own included, but none before the last multiple of `chunk`; besides, the `n_after`
positions behind it that are in the run. `sinks` and `slopes` (ALiBi), float32 [n_head], and `softcap` may be 0, and so
may `bias`, float32 [n_head, 2 * (max_distance + PAGE)], which is added to scores by distance: -(max_distance + PAGE) is
the first. With `cross`, tokens see the encoder's text, else only what is behind it. `firsts` may be 0: an int64 a row,
the first cell that it sees. `partials`, which may be 0, is the address of `partial_bytes` bytes, for the sums of chunks
that other threads computed."""

TILE = 64
MAX_QUERY_ROWS = 8
_ROWS = (1, 2, 3, 4, 6, MAX_QUERY_ROWS)
_LOWEST = -3.0e38
_LINE = 64
_CHUNK = 8
"""Tiles of a chunk. Sums are taken over chunks, then over all of them, so that threads can share the cells of a
sequence."""

_SPLIT_UNITS, _PARTIAL_CHUNKS, _PARTIAL_BYTES = 8, 64, 1 << 26
"""Threads share cells where there are fewer units of heads than this for each. Chunks of each unit that there is memory
for, and the most bytes of it."""

_MAX_STATES, _STATES_BYTES, _SCORE_BYTES = 16, 1 << 17, 4 * MAX_QUERY_ROWS * TILE
"""Units of heads and tokens that go through the cells together, at most, and bytes of their queries and sums."""

_MAX, _SUM, _TOTAL_MAX, _TOTAL_SUM, _ROW_ENDS = 0, 4, 8, 12, 64
"""Offsets of a row's largest score and sum of weights, in this chunk and in all; bytes of all of them."""

_PAGES = TILE // PAGE
_ahead_memory = stack_rows(1)
_LAYER = 24  # bytes of a layer's entry in KVSequence.addresses
_i64 = types.int64


def scratch_bytes(head_dim: int, value_dim: int) -> int:
    """Scratch bytes for each thread.

    Rows of queries and their sums, for several heads or tokens at once, and the scores of one. Values that are parts of
    keys take sums as wide as keys. Writing cells needs less: a row and the codes of a block, padded to full blocks.
    """
    one = 4 * MAX_QUERY_ROWS * (padded(head_dim) + 2 * max(padded(head_dim), padded(value_dim)) + _ROW_ENDS // 4)
    return max(1, min(_MAX_STATES, _STATES_BYTES // one)) * one + _SCORE_BYTES


def partial_bytes(value_dim: int, n_threads: int) -> int:
    """Bytes for the sums of chunks that threads share, zeros at first.

    Where they are too few, a thread takes all cells of a unit, with the same bits.
    """
    units = _SPLIT_UNITS * n_threads
    sums = units * _PARTIAL_CHUNKS * MAX_QUERY_ROWS * (4 * padded(value_dim) + _ROW_ENDS)
    return 8 * units + min(sums, _PARTIAL_BYTES)


def padded(head_dim: int) -> int:
    """Numbers of a row of whole vectors."""
    return -(-head_dim // PAGE) * PAGE


@njit(inline="always")
def _capped(x: Any, cap: Any) -> Any:
    """Logit softcap in each lane: cap * tanh(x / cap).

    tanh(x) = 1 - 2 / (e^2x + 1)
    """
    one, doubled = simd.splat(np.float32(1)), simd.splat(np.float32(2) / cap)
    rest = simd.div(simd.splat(np.float32(2)), simd.add(simd.exp(simd.mul(x, doubled)), one))
    return simd.mul(simd.splat(cap), simd.sub(one, rest))


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
    """Scores of n rows of queries with some pages of keys.

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
        step, n_bytes = cells.dims_at_once(number), cells.key_bytes_at_once(number)

        def add_keys(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            at = b.mul(i, ir.I64(4 * step))
            places = [b.add(rows[page][row], at) for page, row in chains]
            loaded = [cells.load_keys(b, number, part, i) for part in parts]
            for d in range(step):
                totals = [
                    ir.fma(b, ir.broadcast_f32(b, ir.offset(b, place, 4 * d)), loaded[page][d], total)
                    for (page, _), place, total in zip(chains, places, totals, strict=True)
                ]
            return totals

        chains = [(page, row) for page in range(n_abreast) for row in range(n_rows)]
        count = b.sdiv(b.add(head_dim, ir.I64(step - 1)), ir.I64(step))
        zeros = [ir.constant(ir.F32X16, 0.0)] * len(chains)
        totals = _with_prefetch(b, count, n_bytes, following, zeros, add_keys)
        for (page, row), total in zip(chains, totals, strict=True):
            place = ir.offset(b, out, 4 * TILE * row + 4 * PAGE * page)
            ir.store(b, place, cells.absolute_scores(b, number, total))
        return context.get_dummy_value()

    return types.void(kind, n, n_pages, *[_i64] * 7), codegen


@intrinsic(prefer_literal=True)
def _accumulate_values(typingctx: Any, kind: Any, n: Any, n_columns: Any, p: Any, values: Any, n_cells: Any,
                       column: Any, head_dim: Any, out: Any, out_stride: Any, ahead: Any) -> Any:  # fmt: skip
    """Add a page's values, weighted by probabilities, to n output rows.

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
        columns = [b.add(column, ir.I64(PAGE * i)) for i in range(n_abreast)]
        loads = [cells.value_loader(b, number, values, start, head_dim) for start in columns]
        chains = [(i, row) for i in range(n_abreast) for row in range(n_rows)]
        places = [ir.offset(b, rows[row], 4 * PAGE * i) for i, row in chains]

        def add_cell(cell: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            at, loaded = b.mul(cell, ir.I64(4)), [load(cell) for load in loads]
            return [
                ir.fma(b, ir.broadcast_f32(b, ir.offset(b, b.add(weights[i], at), 4 * TILE * row)), loaded[i], total)
                for (i, row), total in zip(chains, totals, strict=True)
            ]

        sums = [ir.load(b, place, ir.F32X16) for place in places]
        n_bytes = n_abreast * cells.value_bytes_at_once(number)
        totals = _with_prefetch(b, n_cells, n_bytes, [ahead], sums, add_cell)
        for place, total in zip(places, totals, strict=True):
            ir.store(b, place, total)
        return context.get_dummy_value()

    return types.void(kind, n, n_columns, *[_i64] * 8), codegen


@intrinsic(prefer_literal=True)
def _stored_weights(typingctx: Any, kind: Any, p: Any) -> Any:
    """Convert 16 weights of keys to weights of stored keys, in place."""
    number = kind.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        ir.store(b, args[1], cells.relative_weights(b, number, ir.load(b, args[1], ir.F32X16)))
        return context.get_dummy_value()

    return types.void(kind, _i64), codegen


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
                weights = [ir.load(b, ir.offset(b, at, 4 * TILE * row), ir.F32X16) for row in range(n_rows)]
                return [ir.fma(b, loaded[i % n_dims], weights[i // n_dims], total) for i, total in enumerate(totals)]

            totals = ir.loop(b, b.sub(n_pages, begin), [none] * UNIT, body)
            for half in (8, 4, 2, 1):  # lane i becomes the sum of the lanes of vector i
                pairs = zip(totals[:half], totals[half:], strict=True)
                low = [lane & ~half | (PAGE if lane & half else 0) for lane in range(PAGE)]
                totals = [
                    b.fadd(ir.shuffle(b, x, y, low), ir.shuffle(b, x, y, [lane | half for lane in low]))
                    for x, y in pairs
                ]
            for row in range(n_rows):
                place = b.add(out, b.mul(out_stride, ir.I64(row)))
                place = b.add(place, b.add(b.mul(unit, ir.I64(4 * UNIT)), ir.I64(4 * first_dim)))
                own = ir.shuffle(b, totals[0], totals[0], list(range(row * n_dims, (row + 1) * n_dims)))
                ir.store(b, place, b.fadd(ir.load(b, place, own.type), own))
        return context.get_dummy_value()

    return types.void(kind, n, *[_i64] * 10), codegen


@njit(inline="always")
def first_seen(cell: Any, window: Any, chunk: Any, first: Any) -> Any:
    """First cell that a token sees, `first` or a later one."""
    return max(max(first, cell + 1 - window), cell // chunk * chunk)


@njit(inline="always")
def _page_of(kv: Any, layer: Any, cell: Any) -> Any:
    return simd.read_i64(simd.read_i64(kv + _LAYER * layer) + 8 * (cell // PAGE))


def part_bytes(name: str) -> Any:
    """Size of a part in bytes, as a compiled function of head_dim."""
    kind = KV_TYPES[name]
    if isinstance(kind, FloatType):
        size = kind.item.itemsize
        return njit(lambda head_dim: PAGE * head_dim * size, inline="always")
    header, unit = kind.header_bytes, kind.unit_bytes
    return njit(lambda head_dim: -(-head_dim // BLOCK) * header + -(-head_dim // UNIT) * unit, inline="always")


@functools.cache
def store_kv(kv_type: KVType) -> Kernel:
    """Kernel that writes new keys and values to the cache.

    A unit of work is one head's share of one page: its cells are written in order.
    """
    write_key, write_value = cells.writer(kv_type.k, True), cells.writer(kv_type.v, False)
    key_bytes, value_bytes = part_bytes(kv_type.k), part_bytes(kv_type.v)

    def store_kv(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, STORE)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        scratch = a.scratch + thread * a.scratch_stride
        kv, number, n_before = np.int64(0), np.int64(-1), -a.n_head_kv
        for row in range(r.first_row, r.n_rows):
            token = rows[row]
            if token.kv != kv or token.cell // PAGE != number:
                kv, number = token.kv, token.cell // PAGE
                n_before += a.n_head_kv
            lane = token.cell % PAGE
            page = _page_of(kv, a.layer, token.cell)
            keys = page + simd.read_i64(kv + _LAYER * a.layer + 8)
            values = page + simd.read_i64(kv + _LAYER * a.layer + 16)
            for head in range((thread - n_before) % n_threads, a.n_head_kv, n_threads):
                k, v = row * a.k_stride + 4 * head * a.head_dim, row * a.v_stride + 4 * head * a.value_dim
                write_key(a.k + k, a.head_dim, keys + head * key_bytes(a.head_dim), lane, scratch)
                if a.v:
                    write_value(a.v + v, a.value_dim, values + head * value_bytes(a.value_dim), lane, scratch)

    return Kernel(store_kv, f"_{kv_type}")


@functools.cache
def attention(kv_type: KVType) -> Kernel:
    """Attention kernel for a pair of KV cache types."""
    return _attention(kv_type, values_in_keys=False)


@functools.cache
def latent_attention(kv_type: KVType) -> Kernel:
    """Attention kernel for values that are the first dimensions of their keys."""
    return _attention(kv_type, values_in_keys=True)


@njit(inline="always")
def _stride(n_dims: Any) -> Any:
    """Bytes of a row of whole vectors."""
    return 4 * (-(-n_dims // PAGE) * PAGE)


@njit(inline="always")
def _end_of_rows(rows: Any, row: Any, stop: Any, most: Any) -> Any:
    """End of the rows of a row's sequence, at most `most`."""
    end = row + 1
    while end < stop and end < row + most and rows[end].kv == rows[row].kv:
        end += 1
    return end


@njit(inline="always")
def _first_of_span(a: Any, row: Any, first_cell: Any) -> Any:
    """First cell that a row sees, in its span if any."""
    if a.firsts:
        return max(first_cell, simd.read_i64(a.firsts + row * a.firsts_stride))
    return first_cell


@njit
def _tiles_seen(args: Any, run: Any, row: Any, end: Any) -> Any:
    """First tile that rows of a sequence see, and the last's end."""
    a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
    rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
    first_cell, stop = rows[row].n_encoded, rows[row].end
    if a.cross:
        first_cell, stop = np.int64(0), first_cell
    first_cell = _first_of_span(a, row, first_cell)
    n_seen = min(stop, rows[row].cell + end - row + max(a.n_after, rows[end - 1].n_ahead))
    first = first_seen(rows[row].cell, a.window, a.chunk, first_cell) // TILE
    return first, max(first + 1, -(-n_seen // TILE))


def _abreast(n: int) -> int:
    """Pages, or vectors of values, that n rows take at once.

    Each multiplication of a sum waits for the one before, so few rows need several sums in turn: 6 of them with
    AVX-512, 4 where a sum takes two registers or more.
    """
    return max(many for many in (1, 2, 4) if many == 1 or n * many <= (6 if isa() in AVX512 else 4))


def _scores_of_rows(kind: int, n: int) -> Any:
    """Compiled function of the scores of n rows with a tile's pages."""
    many = _abreast(n)

    @njit
    def scores(
        q: Any, q_stride: Any, table: Any, keys: Any, head_dim: Any, out: Any, ahead: Any, page: Any, n_pages: Any
    ) -> None:
        while page + many <= n_pages:
            at, row = 8 * page, out + 4 * PAGE * page
            _scores(kind, n, many, q, q_stride, table + at, keys, head_dim, row, ahead + at)
            page += many
        while page < n_pages:
            at, row = 8 * page, out + 4 * PAGE * page
            _scores(kind, n, 1, q, q_stride, table + at, keys, head_dim, row, ahead + at)
            page += 1

    return scores


def _values_of_rows(kind: int, n: int, part_bytes: Any) -> Any:
    """Compiled function that adds a page's values to n rows."""
    many = _abreast(n)

    @njit
    def values(
        p: Any, address: Any, n_cells: Any, n_dims: Any, head_dim: Any, out: Any, out_stride: Any, ahead: Any
    ) -> None:
        n_bytes, column = part_bytes(head_dim), 0
        while column + PAGE * many <= n_dims:
            place = ahead + column * n_bytes // n_dims
            _accumulate_values(kind, n, many, p, address, n_cells, column, n_dims, out, out_stride, place)
            column += PAGE * many
        while column < n_dims:
            place = ahead + column * n_bytes // n_dims
            _accumulate_values(kind, n, 1, p, address, n_cells, column, n_dims, out, out_stride, place)
            column += PAGE

    return values


def _attention(kv_type: KVType, *, values_in_keys: bool) -> Kernel:
    k_type, v_type = cells.NUMBERS[kv_type.k], cells.NUMBERS[kv_type.v]
    rotates_k, rotates_v = (isinstance(KV_TYPES[name], IntegerType) for name in (kv_type.k, kv_type.v))
    rotates_out = rotates_k if values_in_keys else rotates_v
    together = 1 if rotates_k else 4  # rows whose sums over keys are accumulated together
    key_bytes, value_bytes = part_bytes(kv_type.k), part_bytes(kv_type.v)
    scores_1, scores_2, scores_3, scores_4, scores_6, scores_8 = (_scores_of_rows(k_type, n) for n in _ROWS)
    values_1, values_2, values_3, values_4, values_6, values_8 = (
        _values_of_rows(v_type, n, value_bytes) for n in _ROWS
    )

    @njit(inline="always")
    def dims_of_sums(head_dim: Any, value_dim: Any) -> Any:
        """Dimensions of keys or values to sum.

        Keys are rotated in blocks, which are summed whole.
        """
        if values_in_keys and rotates_k:
            block = head_dim & -head_dim
            return -(-value_dim // block) * block
        return value_dim

    @njit
    def start_rows(args: Any, state: Any, first_row: Any, n: Any, first_head: Any, heads: Any) -> None:
        """Read n rows of queries, and begin their sums."""
        a = carray(simd.pointer(args), 1, ATTENTION)[0]
        stride, out_stride = _stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        out, zero = state + MAX_QUERY_ROWS * stride, simd.splat(np.float32(0))
        total = out + MAX_QUERY_ROWS * out_stride
        ends = total + MAX_QUERY_ROWS * out_stride
        for i in range(n):
            head, q = first_head + i % heads, state + i * stride
            source = a.q + (first_row + i // heads) * a.q_stride + 4 * head * a.head_dim
            for d in range(0, 4 * a.head_dim, 4):
                simd.write_f32(q + d, simd.read_f32(source + d) * a.scale)
            for at in range(4 * a.head_dim, stride, 4):  # units of keys may be longer than the head
                simd.write_f32(q + at, np.float32(0))
            if rotates_k:
                cells.rotate(q, a.head_dim, a.head_dim)
            for at in range(i * out_stride, (i + 1) * out_stride, 4 * PAGE):
                simd.store(out + at, zero)
                simd.store(total + at, zero)
            largest, weight = np.float32(_LOWEST), np.float32(0)
            if a.sinks:
                largest, weight = simd.read_f32(a.sinks + 4 * head), np.float32(1)
            at = ends + _ROW_ENDS * i
            simd.write_f32(at + _MAX, np.float32(_LOWEST))
            simd.write_f32(at + _SUM, np.float32(0))
            simd.write_f32(at + _TOTAL_MAX, largest)
            simd.write_f32(at + _TOTAL_SUM, weight)

    @njit
    def rescale_row(sums: Any, out_stride: Any, row_ends: Any, new_max: Any, weights: Any) -> None:
        """Rescale a row's sums to its new maximum; add weights."""
        row_max, row_sum = simd.read_f32(row_ends + _MAX), simd.read_f32(row_ends + _SUM)
        if new_max > row_max:
            rescale = simd.exp(simd.splat(row_max - new_max))
            for place in range(sums, sums + out_stride, 4 * PAGE):
                simd.store(place, simd.mul(simd.load(place), rescale))
            row_sum *= simd.max_f32(rescale)
            simd.write_f32(row_ends + _MAX, new_max)
        simd.write_f32(row_ends + _SUM, row_sum + simd.sum_f32(weights))

    @njit
    def weigh_tile(scores: Any, row_ends: Any, sums: Any, out_stride: Any) -> None:
        """Replace a row's scores with a whole tile by their weights."""
        s0, s1 = simd.load(scores), simd.load(scores + 4 * PAGE)
        s2, s3 = simd.load(scores + 8 * PAGE), simd.load(scores + 12 * PAGE)
        largest = simd.maximum(s0, simd.splat(np.float32(_LOWEST)))
        largest = simd.maximum(s3, simd.maximum(s2, simd.maximum(s1, largest)))
        new_max = max(simd.read_f32(row_ends + _MAX), simd.max_f32(largest))
        highest = simd.splat(new_max)
        p0, p1 = simd.exp(simd.sub(s0, highest)), simd.exp(simd.sub(s1, highest))
        p2, p3 = simd.exp(simd.sub(s2, highest)), simd.exp(simd.sub(s3, highest))
        simd.store(scores, p0)
        simd.store(scores + 4 * PAGE, p1)
        simd.store(scores + 8 * PAGE, p2)
        simd.store(scores + 12 * PAGE, p3)
        total = simd.add(simd.add(simd.add(p0, p1), p2), p3)
        rescale_row(sums, out_stride, row_ends, new_max, total)

    @njit
    def add_tile(
        args: Any, run: Any, state: Any, scores: Any, start: Any, first_row: Any, n_tokens: Any, head_kv: Any,
        first_head: Any, heads: Any, turn: Any, n_turns: Any,
    ) -> None:  # fmt: skip
        """Add a tile of cells to the sums of some tokens.

        It begins at cell `start`; the tokens' heads share one of keys. A turn of `n_turns` prefetches its part of the
        next tile, in the order of memory; one of -1 none.
        """
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        kv, cell, end = rows[first_row].kv, rows[first_row].cell, rows[first_row].end
        first_cell = rows[first_row].n_encoded
        if a.cross:
            first_cell, end = np.int64(0), first_cell
        n_seen = min(end, cell + n_tokens + max(a.n_after, rows[first_row + n_tokens - 1].n_ahead))
        nearest = _first_of_span(a, first_row, first_cell)
        begin = max(0, first_seen(cell, a.window, a.chunk, nearest) // PAGE - start // PAGE)
        n_pages = min(_PAGES, -(-(n_seen - start) // PAGE))
        if begin >= n_pages:
            return
        n, n_dims = n_tokens * heads, dims_of_sums(a.head_dim, a.value_dim)
        stride, out_stride = _stride(a.head_dim), _stride(n_dims)
        q, out = state, state + MAX_QUERY_ROWS * stride
        ends = out + 2 * MAX_QUERY_ROWS * out_stride
        key_part, value_part = key_bytes(a.head_dim), value_bytes(a.value_dim)
        table = simd.read_i64(kv + _LAYER * a.layer) + 8 * (start // PAGE)
        all_keys, all_values = simd.read_i64(kv + _LAYER * a.layer + 8), simd.read_i64(kv + _LAYER * a.layer + 16)
        keys, values = all_keys + head_kv * key_part, all_values + head_kv * value_part
        zero, lowest = simd.splat(np.float32(0)), simd.splat(np.float32(_LOWEST))
        # Parts of the next tile that are prefetched while those of a page are read, or else these once more.
        ahead_keys = _ahead_memory()
        ahead_values, n_ahead, next_page, next_head = ahead_keys + 8 * _PAGES, -_PAGES, np.int64(0), head_kv
        if turn >= 0:
            n_ahead = min(_PAGES, -(-(n_seen - start) // PAGE) - _PAGES)
            next_page, next_head = turn * _PAGES // n_turns, head_kv - turn + turn * _PAGES % n_turns
        for page in range(n_pages):
            in_page = simd.read_i64(table + 8 * page)
            ahead_key, ahead_value = in_page + keys, in_page + values
            if next_page < n_ahead:
                in_page = simd.read_i64(table + 8 * (_PAGES + next_page))
                ahead_key = in_page + all_keys + next_head * key_part
                ahead_value = in_page + all_values + next_head * value_part
            simd.write_i64(ahead_keys + 8 * page, ahead_key)
            simd.write_i64(ahead_values + 8 * page, ahead_value)
            next_head += 1
            if next_head == head_kv - turn + n_turns:
                next_page, next_head = next_page + 1, head_kv - turn
        if n > 6:
            scores_8(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)
        elif n > 4:
            scores_6(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)
        elif n > 3:
            scores_4(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)
        elif n > 2:
            scores_3(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)
        elif n > 1:
            scores_2(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)
        else:
            scores_1(q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)

        is_plain = n_pages - begin == _PAGES and not (a.softcap > 0 or a.slopes or a.bias or values_in_keys)
        for i in range(n):
            own = cell + i // heads
            n_after = max(a.n_after, rows[first_row + i // heads].n_ahead)
            seen = min(end, own + 1 + n_after) - start
            nearest = _first_of_span(a, first_row + i // heads, first_cell)
            unseen = first_seen(own, a.window, a.chunk, nearest) - start
            head, slope = first_head + i % heads, np.float32(0)
            if a.slopes:
                slope = simd.read_f32(a.slopes + 4 * head)
            largest = lowest
            if is_plain and seen >= TILE and unseen <= 0:
                weigh_tile(scores + 4 * TILE * i, ends + _ROW_ENDS * i, out + i * out_stride, out_stride)
                continue
            for page in range(begin, n_pages):
                at = scores + 4 * (i * TILE + page * PAGE)
                score = simd.load(at)
                if a.softcap > 0:
                    score = _capped(score, a.softcap)
                if a.slopes:
                    offset = simd.splat(np.float32(start + page * PAGE - own))
                    distance = simd.absolute(simd.add(simd.lane_numbers(), offset))
                    score = simd.sub(score, simd.mul(distance, simd.splat(slope)))
                if a.bias:
                    distant = max(start + page * PAGE - own, -(a.max_distance + PAGE))
                    place = (2 * head + 1) * (a.max_distance + PAGE) + min(distant, a.max_distance)
                    score = simd.add(score, simd.load(a.bias + 4 * place))
                score = simd.first_lanes(score, seen - page * PAGE, lowest)
                if unseen > page * PAGE:
                    score = simd.first_lanes(lowest, unseen - page * PAGE, score)
                simd.store(at, score)
                largest = simd.maximum(score, largest)
            row_ends = ends + _ROW_ENDS * i
            new_max = max(simd.read_f32(row_ends + _MAX), simd.max_f32(largest))
            total, highest = zero, simd.splat(new_max)
            for page in range(begin, n_pages):
                at = scores + 4 * (i * TILE + page * PAGE)
                p = simd.exp(simd.sub(simd.load(at), highest))
                p = simd.first_lanes(p, seen - page * PAGE, zero)
                if unseen > page * PAGE:
                    p = simd.first_lanes(zero, unseen - page * PAGE, p)
                simd.store(at, p)
                total = simd.add(total, p)
                if values_in_keys:
                    _stored_weights(k_type, at)
            rescale_row(out + i * out_stride, out_stride, row_ends, new_max, total)

        if values_in_keys:
            for unit_of_dims in range(-(-n_dims // UNIT)):
                i = 0
                while i < n:
                    p, sums = scores + 4 * TILE * i, out + i * out_stride
                    if n - i > 1 and not rotates_k:
                        _accumulate_keys(
                            k_type, together, p, table, keys, begin, n_pages, n_seen - start, unit_of_dims,
                            a.head_dim, sums, out_stride,
                        )  # fmt: skip
                        i += together
                    else:
                        _accumulate_keys(
                            k_type, 1, p, table, keys, begin, n_pages, n_seen - start, unit_of_dims, a.head_dim,
                            sums, out_stride,
                        )  # fmt: skip
                        i += 1
            return
        for page in range(begin, n_pages):
            part, ahead = simd.read_i64(table + 8 * page) + values, simd.read_i64(ahead_values + 8 * page)
            p = scores + 4 * PAGE * page
            n_cells = min(PAGE, n_seen - start - page * PAGE)  # cells beyond may hold NaN
            if n > 6:
                values_8(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)
            elif n > 4:
                values_6(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)
            elif n > 3:
                values_4(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)
            elif n > 2:
                values_3(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)
            elif n > 1:
                values_2(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)
            else:
                values_1(p, part, n_cells, n_dims, a.value_dim, out, out_stride, ahead)

    @njit
    def add_chunk(total: Any, ends: Any, out: Any, out_ends: Any, out_stride: Any) -> None:
        """Add a row's sums of a chunk to its totals."""
        weight = simd.read_f32(out_ends + _SUM)
        if weight == np.float32(0):  # no cell seen
            return
        before, own = simd.read_f32(ends + _TOTAL_MAX), simd.read_f32(out_ends + _MAX)
        largest = max(before, own)
        old, new = simd.exp(simd.splat(before - largest)), simd.exp(simd.splat(own - largest))
        for at in range(0, out_stride, 4 * PAGE):
            sums = simd.mul(simd.load(total + at), old)
            simd.store(total + at, simd.fma(simd.load(out + at), new, sums))
        weights = simd.mul(simd.splat(simd.read_f32(ends + _TOTAL_SUM)), old)
        simd.write_f32(ends + _TOTAL_SUM, simd.max_f32(simd.fma(simd.splat(weight), new, weights)))
        simd.write_f32(ends + _TOTAL_MAX, largest)

    @njit
    def write_row(args: Any, total: Any, ends: Any, row: Any, head: Any) -> None:
        """Write one head of a row of the output."""
        a = carray(simd.pointer(args), 1, ATTENTION)[0]
        inverse_sum = np.float32(1) / simd.read_f32(ends + _TOTAL_SUM)
        if rotates_out:
            n_dims = dims_of_sums(a.head_dim, a.value_dim)
            cells.rotate(total, n_dims, a.head_dim if values_in_keys else n_dims)
        target = a.out + row * a.out_stride + 4 * head * a.value_dim
        for d in range(0, 4 * a.value_dim, 4):
            simd.write_f32(target + d, simd.read_f32(total + d) * inverse_sum)

    @njit
    def add_tiles(
        args: Any, run: Any, scratch: Any, first_row: Any, last_row: Any, first_unit: Any, last_unit: Any,
        first_tile: Any, last_tile: Any, counters: Any, partials: Any, chunk: Any, n_chunks: Any,
    ) -> None:  # fmt: skip
        """Attention of some rows of a sequence to some tiles.

        It computes some units of heads. With `partials`, these are the tiles of a chunk, one of n_chunks, and their
        sums are written there.
        """
        a = carray(simd.pointer(args), 1, ATTENTION)[0]
        n_heads = min(a.group, MAX_QUERY_ROWS)
        n_tokens, n_parts = MAX_QUERY_ROWS // n_heads, -(-a.group // n_heads)
        stride, out_stride = _stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        own_out, own_total = MAX_QUERY_ROWS * stride, MAX_QUERY_ROWS * (stride + out_stride)
        own_ends = own_total + MAX_QUERY_ROWS * out_stride
        state_bytes = own_ends + MAX_QUERY_ROWS * _ROW_ENDS
        entry = out_stride + _ROW_ENDS
        scores = scratch + a.scratch_stride - _SCORE_BYTES
        n_blocks = -(-(last_row - first_row) // n_tokens)
        n_states = n_blocks * (last_unit - first_unit)
        first_kv = first_unit // n_parts
        n_kv = (last_unit - 1) // n_parts + 1 - first_kv
        zero = simd.splat(np.float32(0))
        for tile in range(first_tile, last_tile):
            for number in range(n_states):
                unit, row = first_unit + number // n_blocks, first_row + number % n_blocks * n_tokens
                head_kv, part, state = unit // n_parts, unit % n_parts, scratch + number * state_bytes
                first_head = head_kv * a.group + part * n_heads
                heads, count = min(n_heads, a.group - part * n_heads), min(n_tokens, last_row - row)
                if tile == first_tile:
                    start_rows(args, state, row, count * heads, first_head, heads)
                turn = np.int64(-1)
                if row == first_row and (part == 0 or unit == first_unit):
                    turn = head_kv - first_kv
                add_tile(
                    args, run, state, scores, tile * TILE, row, count, head_kv, first_head, heads, turn, n_kv,
                )  # fmt: skip
                if tile < last_tile - 1 and (tile + 1) % _CHUNK:
                    continue
                for i in range(count * heads):
                    out, total = state + own_out + i * out_stride, state + own_total + i * out_stride
                    ends, head = state + own_ends + i * _ROW_ENDS, first_head + i % heads
                    if partials:
                        place = (row + i // heads - first_row) * a.n_head_kv * a.group + head
                        place = partials + (place * n_chunks + chunk) * entry
                        for at in range(0, out_stride, 4 * PAGE):
                            simd.store(place + at, simd.load(out + at))
                        simd.store(place + out_stride, simd.load(ends))
                        continue
                    add_chunk(total, ends, out, ends, out_stride)
                    for at in range(0, out_stride, 4 * PAGE):
                        simd.store(out + at, zero)
                    simd.write_f32(ends + _MAX, np.float32(_LOWEST))
                    simd.write_f32(ends + _SUM, np.float32(0))
                    if tile == last_tile - 1:
                        write_row(args, total, ends, row + i // heads, head)
        if not partials:
            return
        for unit in range(first_unit, last_unit):
            if simd.atomic_add(counters + 8 * unit, 1) < n_chunks - 1:
                continue
            simd.write_i64(counters + 8 * unit, 0)
            head_kv, part = unit // n_parts, unit % n_parts
            first_head = head_kv * a.group + part * n_heads
            heads = min(n_heads, a.group - part * n_heads)
            for row in range(first_row, last_row):
                number = (unit - first_unit) * n_blocks + (row - first_row) // n_tokens
                state = scratch + number * state_bytes
                for head in range(first_head, first_head + heads):
                    i = (row - first_row) % n_tokens * heads + head - first_head
                    total, ends = state + own_total + i * out_stride, state + own_ends + i * _ROW_ENDS
                    place = partials + ((row - first_row) * a.n_head_kv * a.group + head) * n_chunks * entry
                    for sums in range(place, place + n_chunks * entry, entry):
                        add_chunk(total, ends, sums, sums + out_stride, out_stride)
                    write_row(args, total, ends, row, head)

    def attention(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        n_heads = min(a.group, MAX_QUERY_ROWS)
        n_tokens, n_units = MAX_QUERY_ROWS // n_heads, a.n_head_kv * -(-a.group // n_heads)
        stride, out_stride = _stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        state_bytes = MAX_QUERY_ROWS * (stride + 2 * out_stride + _ROW_ENDS)
        most = (a.scratch_stride - _SCORE_BYTES) // state_bytes
        n_rows = r.n_rows - r.first_row
        # Tokens go through the cells together, as many as leave some units for each thread.
        most_rows = n_tokens * max(1, min(most, -(-n_rows // n_tokens) * n_units // (4 * n_threads)))
        is_split = a.partials != 0 and n_threads > 1 and n_rows * n_units < _SPLIT_UNITS * n_threads
        work, room = np.int64(0), a.partial_bytes - 8 * _SPLIT_UNITS * n_threads
        row = r.first_row
        while row < r.n_rows:
            end = _end_of_rows(rows, row, r.n_rows, most_rows)
            first_tile, last_tile = _tiles_seen(args, run, row, end)
            work += -(-(end - row) // n_tokens) * (last_tile - first_tile) * n_units
            n_chunks = (last_tile - 1) // _CHUNK + 1 - first_tile // _CHUNK
            room -= (end - row) * a.n_head_kv * a.group * n_chunks * (out_stride + _ROW_ENDS)
            row = end
        if room < 0:
            is_split = False
        # A thread takes the units that begin in its share of the work.
        begin, stop = thread * work // n_threads, (thread + 1) * work // n_threads
        scratch = a.scratch + thread * a.scratch_stride
        partials = a.partials + 8 * _SPLIT_UNITS * n_threads
        done, row = np.int64(0), r.first_row
        while row < r.n_rows:
            end = _end_of_rows(rows, row, r.n_rows, most_rows)
            n_blocks = -(-(end - row) // n_tokens)
            first_tile, last_tile = _tiles_seen(args, run, row, end)
            n_chunks = (last_tile - 1) // _CHUNK + 1 - first_tile // _CHUNK
            if not is_split:
                n_chunks = 1
            next_tile = first_tile
            for chunk in range(n_chunks):
                tile = next_tile
                next_tile = min(last_tile, (tile // _CHUNK + 1) * _CHUNK) if is_split else last_tile
                each = n_blocks * (next_tile - tile)
                first_unit = min(n_units, max(0, -(-(begin - done) // each)))
                last_unit = min(n_units, max(0, -(-(stop - done) // each)))
                done += each * n_units
                n_together = max(1, most // n_blocks)
                while first_unit < last_unit:
                    last = min(first_unit + n_together, last_unit)
                    add_tiles(
                        args, run, scratch, row, end, first_unit, last, tile, next_tile,
                        a.partials + 8 * (row - r.first_row) * n_units,
                        partials if is_split else 0, chunk, n_chunks,
                    )  # fmt: skip
                    first_unit = last
            if is_split:
                partials += (end - row) * a.n_head_kv * a.group * n_chunks * (out_stride + _ROW_ENDS)
            row = end

    return Kernel(attention, f"_latent_{kv_type.k}" if values_in_keys else f"_{kv_type}")

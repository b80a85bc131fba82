"""FlashAttention kernel over the pages of a KV cache.

For a row of queries, keys are processed in tiles of TILE positions with an online softmax (Milakov and Gimelshein 2018,
Dao et al. 2022). Tiles lie at fixed positions, so a token's result is the same bits whether it is evaluated alone or
with others. Up to MAX_QUERY_ROWS rows of queries that share a head of keys and values are processed together: the heads
of a group (GQA), and in a prompt several tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, intrinsic, njit, types
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
    "firsts_stride",
    scale=np.float32, softcap=np.float32,
)  # fmt: skip
"""`group` heads of queries share a head of keys and values; `scratch` is `scratch_stride` bytes for each thread.
A token sees `window` positions, its own included, but none before the last multiple of `chunk`; besides, the `n_after`
positions behind it that are in the run. `sinks` and `slopes` (ALiBi), float32 [n_head], and `softcap` may be 0, and so
may `bias`, float32 [n_head, 2 * (max_distance + PAGE)], which is added to scores by distance: -(max_distance + PAGE) is
the first. With `cross`, tokens see the encoder's text, else only what is behind it. `firsts` may be 0: an int64 a row,
the first cell that it sees."""

TILE = 64
MAX_QUERY_ROWS = 8
_LOWEST = -3.0e38
_PAGES = TILE // PAGE
_LAYER = 24  # bytes of a layer's entry in KVSequence.addresses
_i64 = types.int64


def scratch_bytes(head_dim: int, value_dim: int) -> int:
    """Scratch bytes for each thread.

    Rows of queries, scores and sums, then a maximum and a sum a row. Values that are parts of keys take sums as wide as
    keys. Writing cells needs less: a row and the codes of a block, padded to full blocks.
    """
    return 4 * MAX_QUERY_ROWS * (padded(head_dim) + max(padded(head_dim), padded(value_dim)) + TILE + 2)


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


@intrinsic(prefer_literal=True)
def _scores(typingctx: Any, kind: Any, n: Any, q: Any, q_stride: Any, keys: Any, head_dim: Any, out: Any) -> Any:
    """Scores of n rows of queries with one page of keys.

    Written to `out`, rows of TILE scores. Literals: n and the keys' type.
    """
    number, n_rows = kind.literal_value, n.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, q, q_stride, keys, head_dim, out = args
        rows = [b.add(q, b.mul(q_stride, ir.I64(row))) for row in range(n_rows)]
        step = cells.dims_at_once(number)

        def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            at = b.mul(i, ir.I64(4 * step))
            places = [b.add(row, at) for row in rows]
            for d, key in enumerate(cells.load_keys(b, number, keys, i)):
                totals = [
                    ir.fma(b, ir.broadcast_f32(b, ir.offset(b, place, 4 * d)), key, total)
                    for place, total in zip(places, totals, strict=True)
                ]
            return totals

        count = b.sdiv(b.add(head_dim, ir.I64(step - 1)), ir.I64(step))
        totals = ir.loop(b, count, [ir.constant(ir.F32X16, 0.0)] * n_rows, body)
        for row, total in enumerate(totals):
            ir.store(b, ir.offset(b, out, 4 * TILE * row), cells.absolute_scores(b, number, total))
        return context.get_dummy_value()

    return types.void(kind, n, *[_i64] * 5), codegen


@intrinsic(prefer_literal=True)
def _accumulate_values(typingctx: Any, kind: Any, n: Any, p: Any, values: Any, n_cells: Any, column: Any, head_dim: Any,
           out: Any, out_stride: Any) -> Any:  # fmt: skip
    """Add a page's values, weighted by probabilities, to n output rows.

    Accumulates 16 columns of `out`, from the first `n_cells` cells of the page; row i of `p` weighs them for row i of
    `out`.
    """
    number, n_rows = kind.literal_value, n.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, p, values, n_cells, column, head_dim, out, out_stride = args
        out = b.add(out, b.mul(column, ir.I64(4)))
        places = [b.add(out, b.mul(out_stride, ir.I64(row))) for row in range(n_rows)]
        load = cells.value_loader(b, number, values, column, head_dim)

        def body(cell: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            value = load(cell)
            at = b.add(p, b.mul(cell, ir.I64(4)))
            return [
                ir.fma(b, ir.broadcast_f32(b, ir.offset(b, at, 4 * TILE * row)), value, total)
                for row, total in enumerate(totals)
            ]

        totals = ir.loop(b, n_cells, [ir.load(b, place, ir.F32X16) for place in places], body)
        for place, total in zip(places, totals, strict=True):
            ir.store(b, place, total)
        return context.get_dummy_value()

    return types.void(kind, n, *[_i64] * 7), codegen


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
def _prefetch(address: Any, n_bytes: Any) -> None:
    """Prefetch the cache lines of a part.

    The parts of a head are far apart, so the processor does not foresee them. The first-level cache could not wait for
    all lines of a part at once.
    """
    for line in range(address, address + n_bytes, 64):
        simd.prefetch(line)


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


def _attention(kv_type: KVType, *, values_in_keys: bool) -> Kernel:
    k_type, v_type = cells.NUMBERS[kv_type.k], cells.NUMBERS[kv_type.v]
    rotates_k, rotates_v = (isinstance(KV_TYPES[name], IntegerType) for name in (kv_type.k, kv_type.v))
    rotates_out = rotates_k if values_in_keys else rotates_v
    together = 1 if rotates_k else 4  # rows whose sums over keys are accumulated together
    key_bytes, value_bytes = part_bytes(kv_type.k), part_bytes(kv_type.v)

    def attention(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        # Dimensions of keys or values to sum. Keys are rotated in blocks, which are summed whole.
        n_dims = out_dim = a.value_dim
        if values_in_keys:
            if rotates_k:
                block = a.head_dim & -a.head_dim
                n_dims = -(-n_dims // block) * block
            out_dim = a.head_dim
        stride, out_stride = 4 * (-(-a.head_dim // PAGE) * PAGE), 4 * (-(-n_dims // PAGE) * PAGE)
        q = a.scratch + thread * a.scratch_stride
        out = q + MAX_QUERY_ROWS * stride
        scores = out + MAX_QUERY_ROWS * out_stride
        row_max = carray(simd.pointer(scores + 4 * MAX_QUERY_ROWS * TILE), MAX_QUERY_ROWS, np.float32)
        row_sum = carray(simd.pointer(scores + 4 * MAX_QUERY_ROWS * (TILE + 1)), MAX_QUERY_ROWS, np.float32)
        zero, lowest = simd.splat(np.float32(0)), simd.splat(np.float32(_LOWEST))

        # Unit of work: some tokens and some query heads of one KV head, at most MAX_QUERY_ROWS rows of queries.
        n_heads = min(a.group, MAX_QUERY_ROWS)
        n_tokens = MAX_QUERY_ROWS // n_heads
        n_parts, n_groups = -(-a.group // n_heads), -(-(r.n_rows - r.first_row) // n_tokens) * a.n_head_kv
        # Where threads would have no unit, units have fewer heads: each reads the cells again, at the same time.
        while n_heads > 1 and n_groups * -(-a.group // ((n_heads + 1) // 2)) <= n_threads:
            n_heads = (n_heads + 1) // 2
            n_parts = -(-a.group // n_heads)
        a_token, n_units = a.n_head_kv * n_parts, n_groups * n_parts
        # Fewer units than threads go to threads apart, and thereby to all parts of a processor and all NUMA nodes.
        apart = max(1, n_threads // max(1, n_units))
        first_unit = thread // apart if thread % apart == 0 else n_units
        for unit in range(first_unit, n_units, n_threads):
            unit_row = r.first_row + unit // a_token * n_tokens
            unit_end = min(unit_row + n_tokens, r.n_rows)
            head_kv, first_head = unit % a_token // n_parts, unit % n_parts * n_heads
            heads = min(n_heads, a.group - first_head)
            while unit_row < unit_end:  # tokens of one sequence at a time
                first_row, last_row = unit_row, unit_row + 1
                kv, cell, end = rows[first_row].kv, rows[first_row].cell, rows[first_row].end
                first_cell = rows[first_row].n_encoded
                if a.cross:
                    first_cell, end = np.int64(0), first_cell
                while last_row < unit_end and rows[last_row].kv == kv:
                    last_row += 1
                unit_row = last_row
                n = (last_row - first_row) * heads
                table = simd.read_i64(kv + _LAYER * a.layer)
                keys = simd.read_i64(kv + _LAYER * a.layer + 8) + head_kv * key_bytes(a.head_dim)
                values = simd.read_i64(kv + _LAYER * a.layer + 16) + head_kv * value_bytes(a.value_dim)
                for i in range(n):
                    head = head_kv * a.group + first_head + i % heads
                    source = (first_row + i // heads) * a.q_stride + 4 * head * a.head_dim
                    for d in range(a.head_dim):
                        simd.write_f32(q + i * stride + 4 * d, simd.read_f32(a.q + source + 4 * d) * a.scale)
                    for at in range(4 * a.head_dim, stride, 4):  # units of keys may be longer than the head
                        simd.write_f32(q + i * stride + at, np.float32(0))
                    if rotates_k:
                        cells.rotate(q + i * stride, a.head_dim, a.head_dim)
                    for at in range(0, out_stride, 4 * PAGE):
                        simd.store(out + i * out_stride + at, zero)
                    row_max[i], row_sum[i] = np.float32(_LOWEST), np.float32(0)
                    if a.sinks:
                        row_max[i], row_sum[i] = simd.read_f32(a.sinks + 4 * head), np.float32(1)

                key_part, value_part = key_bytes(a.head_dim), value_bytes(a.value_dim)
                n_seen = min(end, cell + last_row - first_row + max(a.n_after, rows[last_row - 1].n_ahead))
                nearest = first_cell
                if a.firsts:
                    nearest = max(nearest, simd.read_i64(a.firsts + first_row * a.firsts_stride))
                first_page = first_seen(cell, a.window, a.chunk, nearest) // PAGE
                for start in range(first_page * PAGE // TILE * TILE, n_seen, TILE):
                    begin = max(0, first_page - start // PAGE)
                    n_pages = min(_PAGES, -(-(n_seen - start) // PAGE))
                    for page in range(begin, n_pages):
                        page_ptr = simd.read_i64(table + 8 * (start // PAGE + page))
                        if not values_in_keys:
                            _prefetch(page_ptr + values, value_part)
                        page_ptr += keys
                        at = scores + 4 * PAGE * page
                        if n > 6:
                            _scores(k_type, 8, q, stride, page_ptr, a.head_dim, at)
                        elif n > 4:
                            _scores(k_type, 6, q, stride, page_ptr, a.head_dim, at)
                        elif n > 3:
                            _scores(k_type, 4, q, stride, page_ptr, a.head_dim, at)
                        elif n > 2:
                            _scores(k_type, 3, q, stride, page_ptr, a.head_dim, at)
                        elif n > 1:
                            _scores(k_type, 2, q, stride, page_ptr, a.head_dim, at)
                        else:
                            _scores(k_type, 1, q, stride, page_ptr, a.head_dim, at)

                    for i in range(n):
                        own = cell + i // heads
                        n_after = max(a.n_after, rows[first_row + i // heads].n_ahead)
                        seen = min(end, own + 1 + n_after) - start
                        nearest = first_cell
                        if a.firsts:
                            nearest = max(nearest, simd.read_i64(a.firsts + (first_row + i // heads) * a.firsts_stride))
                        unseen = first_seen(own, a.window, a.chunk, nearest) - start
                        head, slope = head_kv * a.group + first_head + i % heads, np.float32(0)
                        if a.slopes:
                            slope = simd.read_f32(a.slopes + 4 * head)
                        largest = lowest
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
                        new_max = max(row_max[i], simd.max_f32(largest))
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
                        if new_max > row_max[i]:
                            rescale = simd.exp(simd.splat(row_max[i] - new_max))
                            for at in range(0, out_stride, 4 * PAGE):
                                place = out + i * out_stride + at
                                simd.store(place, simd.mul(simd.load(place), rescale))
                            row_sum[i] *= simd.max_f32(rescale)
                            row_max[i] = new_max
                        row_sum[i] += simd.sum_f32(total)

                    if values_in_keys:
                        pages = table + 8 * (start // PAGE)
                        for unit_of_dims in range(-(-n_dims // UNIT)):
                            i = 0
                            while i < n:
                                p, sums = scores + 4 * TILE * i, out + i * out_stride
                                if n - i > 1 and not rotates_k:
                                    _accumulate_keys(
                                        k_type, together, p, pages, keys, begin, n_pages, n_seen - start,
                                        unit_of_dims, a.head_dim, sums, out_stride,
                                    )  # fmt: skip
                                    i += together
                                else:
                                    _accumulate_keys(
                                        k_type, 1, p, pages, keys, begin, n_pages, n_seen - start, unit_of_dims,
                                        a.head_dim, sums, out_stride,
                                    )  # fmt: skip
                                    i += 1
                        continue
                    for page in range(begin, n_pages):
                        page_ptr = simd.read_i64(table + 8 * (start // PAGE + page)) + values
                        if start + TILE + page * PAGE < n_seen:  # keys of the next tile
                            _prefetch(simd.read_i64(table + 8 * (start // PAGE + page + _PAGES)) + keys, key_part)
                        p = scores + 4 * PAGE * page
                        n_cells = min(PAGE, n_seen - start - page * PAGE)  # cells beyond may hold NaN
                        for column in range(0, n_dims, PAGE):
                            if n > 6:
                                _accumulate_values(v_type, 8, p, page_ptr, n_cells, column, n_dims, out, out_stride)
                            elif n > 4:
                                _accumulate_values(v_type, 6, p, page_ptr, n_cells, column, n_dims, out, out_stride)
                            elif n > 3:
                                _accumulate_values(v_type, 4, p, page_ptr, n_cells, column, n_dims, out, out_stride)
                            elif n > 2:
                                _accumulate_values(v_type, 3, p, page_ptr, n_cells, column, n_dims, out, out_stride)
                            elif n > 1:
                                _accumulate_values(v_type, 2, p, page_ptr, n_cells, column, n_dims, out, out_stride)
                            else:
                                _accumulate_values(v_type, 1, p, page_ptr, n_cells, column, n_dims, out, out_stride)

                for i in range(n):
                    head = head_kv * a.group + first_head + i % heads
                    target = (first_row + i // heads) * a.out_stride + 4 * head * a.value_dim
                    inverse_sum = np.float32(1) / row_sum[i]
                    if rotates_out:
                        cells.rotate(out + i * out_stride, n_dims, out_dim)
                    for d in range(a.value_dim):
                        simd.write_f32(
                            a.out + target + 4 * d, simd.read_f32(out + i * out_stride + 4 * d) * inverse_sum
                        )

    return Kernel(attention, f"_latent_{kv_type.k}" if values_in_keys else f"_{kv_type}")

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
from typing import Any

import numpy as np

from llamacli.kernels import attention_integers, attention_registers, attention_tiles, simd
from llamacli.kernels.attention_registers import (
    LOWEST,
    ROW_SCORES,
    TILE,
    keys_of_tile,
    to_relative_weights,
)
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.groups import stack_rows
from llamacli.kernels.jit import Kernel
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.rounding import BLOCK
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, UNIT, FloatType, IntegerType, KVType
from llamacli.kernels.layout import ROW, RUN, record
from llamacli.kernels.tiles import LINE, configure, release

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

MAX_QUERY_ROWS = 8
_CHUNK = 8
"""Tiles of a chunk. Sums are taken over chunks, then over all of them, so that threads can share the cells of a
sequence."""

_SPLIT_UNITS, _PARTIAL_CHUNKS, _PARTIAL_BYTES = 8, 64, 1 << 26
"""Threads share cells where there are fewer units of heads than this for each. Chunks of each unit that there is memory
for, and the most bytes of it."""

_MAX_STATES, _STATES_BYTES = 16, 1 << 17
"""Units of heads and tokens that go through the cells together, at most, and bytes of their queries and sums."""

_ENDS, _PARTIAL_ENDS = 16, 64
"""Bytes of a row's largest score and sum of weights, in this chunk and in all; of the former two beside shared sums."""

_PAGES = TILE // PAGE
_ahead_memory = stack_rows(1)
_LAYER = 24  # bytes of a layer's entry in KVSequence.addresses


def scratch_bytes(head_dim: int, value_dim: int, *, in_tiles: bool = False) -> int:
    """Scratch bytes for each thread.

    Rows of queries and their sums, for several heads or tokens at once, and the scores of one. Values that are parts of
    keys take sums as wide as keys. With `in_tiles`, also keys and values in bfloat16. Writing cells needs less: a row
    and the codes of a block, padded to full blocks.
    """
    if in_tiles:
        one = 4 * attention_tiles.ROWS * (attention_tiles.padded(head_dim) + 2 * padded(value_dim) + _ENDS // 4)
        rest = attention_tiles.ROWS * ROW_SCORES + 2 * TILE * (attention_tiles.padded(head_dim) + padded(value_dim))
        return _MAX_STATES * one + rest
    one = 4 * MAX_QUERY_ROWS * (padded(head_dim) + 2 * max(padded(head_dim), padded(value_dim)) + _ENDS // 4)
    return max(1, min(_MAX_STATES, _STATES_BYTES // one)) * one + MAX_QUERY_ROWS * ROW_SCORES


def partial_bytes(value_dim: int, n_threads: int) -> int:
    """Bytes for the sums of chunks that threads share, zeros at first.

    Where they are too few, a thread takes all cells of a unit, with the same bits.
    """
    units = _SPLIT_UNITS * n_threads
    sums = units * _PARTIAL_CHUNKS * MAX_QUERY_ROWS * (4 * padded(value_dim) + _PARTIAL_ENDS)
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
    return _attention(kv_type)


@functools.cache
def latent_attention(kv_type: KVType) -> Kernel:
    """Attention kernel for values that are the first dimensions of their keys."""
    return _attention(kv_type, values_in_keys=True)


@functools.cache
def tiled_attention(kv_type: KVType) -> Kernel:
    """Attention kernel by AMX, for prompts, see `attention_tiles`."""
    return _attention(kv_type, in_tiles=True)


@njit(inline="always")
def _stride(n_dims: Any) -> Any:
    """Bytes of a row of whole vectors."""
    return 4 * (-(-n_dims // PAGE) * PAGE)


@njit(inline="always")
def _scaled(x: Any, factor: Any, out: Any, n: Any) -> None:
    """Write n numbers times a factor."""
    whole = 4 * (n // PAGE * PAGE)
    for d in range(0, whole, 4 * PAGE):
        simd.store(out + d, simd.mul(simd.load(x + d), simd.splat(factor)))
    for d in range(whole, 4 * n, 4):
        simd.write_f32(out + d, simd.read_f32(x + d) * factor)


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
def _end_seen(args: Any, run: Any, row: Any, end: Any) -> Any:
    """End of the cells that rows of a sequence see."""
    a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
    rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
    stop = rows[row].n_encoded if a.cross else rows[row].end
    return min(stop, rows[row].cell + end - row + max(a.n_after, rows[end - 1].n_ahead))


@njit
def _first_cell_seen(args: Any, run: Any, row: Any) -> Any:
    """First cell that a row sees."""
    a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
    token = carray(simd.pointer(r.rows), r.n_rows, ROW)[row]
    first_cell = _first_of_span(a, row, np.int64(0) if a.cross else token.n_encoded)
    return first_seen(token.cell, a.window, a.chunk, first_cell)


@njit
def _tiles_seen(args: Any, run: Any, row: Any, end: Any) -> Any:
    """First tile that rows of a sequence see, and the last's end."""
    first = _first_cell_seen(args, run, row) // TILE
    return first, max(first + 1, -(-_end_seen(args, run, row, end) // TILE))


def _attention(kv_type: KVType, *, values_in_keys: bool = False, in_tiles: bool = False) -> Kernel:
    k_type = cells.NUMBERS[kv_type.k]
    rotates_k, rotates_v = (isinstance(KV_TYPES[name], IntegerType) for name in (kv_type.k, kv_type.v))
    rotates_out = rotates_k if values_in_keys else rotates_v
    key_bytes, value_bytes = part_bytes(kv_type.k), part_bytes(kv_type.v)
    scores_of = (attention_integers if rotates_k else attention_registers).scores_of_tile(kv_type.k)
    values_of = (attention_integers if rotates_v else attention_registers).values_of_tile(kv_type.v)
    keys_of = keys_of_tile(kv_type.k)
    convert = attention_tiles.rounded_tile(kv_type.k, kv_type.v)
    scores_in_tiles = attention_tiles.scores_of_tile(kv_type.k)
    max_rows = attention_tiles.ROWS if in_tiles else MAX_QUERY_ROWS
    max_at, sum_at, total_max_at, total_sum_at = (4 * max_rows * i for i in range(4))
    unit = 2 * PAGE if in_tiles else PAGE  # numbers that a row of queries is padded to

    @njit(inline="always")
    def rounded_key_bytes(head_dim: Any) -> Any:
        """Bytes of a tile's keys in bfloat16."""
        return query_stride(head_dim) // 2 * TILE

    @njit(inline="always")
    def rest_bytes(head_dim: Any, value_dim: Any) -> Any:
        """Bytes of the scores of rows, and of a tile in bfloat16."""
        if in_tiles:
            return max_rows * ROW_SCORES + rounded_key_bytes(head_dim) + _stride(value_dim) // 2 * TILE
        return max_rows * ROW_SCORES

    @njit(inline="always")
    def query_stride(head_dim: Any) -> Any:
        """Bytes of a row of queries."""
        return 4 * (-(-head_dim // unit) * unit)

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
        stride, out_stride = query_stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        out, zero = state + max_rows * stride, simd.splat(np.float32(0))
        total = out + max_rows * out_stride
        ends = total + max_rows * out_stride
        for i in range(n):
            head, q = first_head + i % heads, state + i * stride
            source = a.q + (first_row + i // heads) * a.q_stride + 4 * head * a.head_dim
            _scaled(source, a.scale, q, a.head_dim)
            for at in range(4 * a.head_dim, stride, 4):  # units of keys may be longer than the head
                simd.write_f32(q + at, np.float32(0))
            if rotates_k:
                cells.rotate(q, a.head_dim, a.head_dim)
            if in_tiles:
                for d in range(0, stride // 2, LINE):
                    attention_tiles.round_line(q + 2 * d, q + d)
            elif rotates_k:
                attention_integers.round_queries(q, stride)
            for at in range(i * out_stride, (i + 1) * out_stride, 4 * PAGE):
                simd.store(out + at, zero)
                simd.store(total + at, zero)
            largest, weight = np.float32(LOWEST), np.float32(0)
            if a.sinks:
                largest, weight = simd.read_f32(a.sinks + 4 * head), np.float32(1)
            at = ends + 4 * i
            simd.write_f32(at + max_at, np.float32(LOWEST))
            simd.write_f32(at + sum_at, np.float32(0))
            simd.write_f32(at + total_max_at, largest)
            simd.write_f32(at + total_sum_at, weight)

    @njit
    def rescale_row(sums: Any, out_stride: Any, row_ends: Any, new_max: Any, weights: Any) -> None:
        """Rescale a row's sums to its new maximum; add weights."""
        row_max, row_sum = simd.read_f32(row_ends + max_at), simd.read_f32(row_ends + sum_at)
        if new_max > row_max:
            rescale = simd.exp(simd.splat(row_max - new_max))
            for place in range(sums, sums + out_stride, 4 * PAGE):
                simd.store(place, simd.mul(simd.load(place), rescale))
            row_sum *= simd.max_f32(rescale)
            simd.write_f32(row_ends + max_at, new_max)
        simd.write_f32(row_ends + sum_at, row_sum + simd.sum_f32(weights))

    @njit
    def weigh_tile(scores: Any, row_ends: Any, sums: Any, out_stride: Any) -> None:
        """Replace a row's scores with a whole tile by their weights."""
        s0, s1 = simd.load(scores), simd.load(scores + 4 * PAGE)
        s2, s3 = simd.load(scores + 8 * PAGE), simd.load(scores + 12 * PAGE)
        largest = simd.maximum(s0, simd.splat(np.float32(LOWEST)))
        largest = simd.maximum(s3, simd.maximum(s2, simd.maximum(s1, largest)))
        new_max = max(simd.read_f32(row_ends + max_at), simd.max_f32(largest))
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
    def round_tile(args: Any, run: Any, out: Any, start: Any, row: Any, end: Any, head_kv: Any) -> None:
        """Round the keys and values of a tile, as far as seen."""
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        kv = carray(simd.pointer(r.rows), r.n_rows, ROW)[row].kv
        begin = max(0, _first_cell_seen(args, run, row) // PAGE - start // PAGE)  # earlier pages may be dropped
        entry = simd.read_i64(kv + _LAYER * a.layer) + 8 * (start // PAGE)
        keys = simd.read_i64(kv + _LAYER * a.layer + 8) + head_kv * key_bytes(a.head_dim)
        values = simd.read_i64(kv + _LAYER * a.layer + 16) + head_kv * value_bytes(a.value_dim)
        n_cells = _end_seen(args, run, row, end) - start
        convert(entry, keys, values, begin, n_cells, a.head_dim, a.value_dim, out, out + rounded_key_bytes(a.head_dim))

    @njit
    def adjust_row(
        args: Any, scores: Any, head: Any, start: Any, own: Any, seen: Any, unseen: Any, begin: Any, n_pages: Any
    ) -> Any:
        """Bound, shift and mask a row's scores.

        Returns the largest of each lane. Cells from `unseen` to `seen` - 1 of the tile are seen by the token of cell
        `own`.
        """
        a, lowest = carray(simd.pointer(args), 1, ATTENTION)[0], simd.splat(np.float32(LOWEST))
        slope, largest = np.float32(0), lowest
        if a.slopes:
            slope = simd.read_f32(a.slopes + 4 * head)
        for page in range(begin, n_pages):
            at = scores + 4 * PAGE * page
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
        return largest

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
        stride, out_stride = query_stride(a.head_dim), _stride(n_dims)
        q, out = state, state + max_rows * stride
        ends = out + 2 * max_rows * out_stride
        key_part, value_part = key_bytes(a.head_dim), value_bytes(a.value_dim)
        table = simd.read_i64(kv + _LAYER * a.layer) + 8 * (start // PAGE)
        all_keys, all_values = simd.read_i64(kv + _LAYER * a.layer + 8), simd.read_i64(kv + _LAYER * a.layer + 16)
        keys, values = all_keys + head_kv * key_part, all_values + head_kv * value_part
        zero = simd.splat(np.float32(0))
        rounded_keys = scores + max_rows * ROW_SCORES
        ahead_keys = _ahead_memory()
        ahead_values = ahead_keys + 8 * _PAGES
        if in_tiles:
            begin, n_pages = 0, _PAGES
            scores_in_tiles(n, q, stride, rounded_keys, a.head_dim, scores)
        else:
            # Parts of the next tile that are prefetched while those of a page are read, or else these once more.
            n_ahead, next_page, next_head = -_PAGES, np.int64(0), head_kv
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
            scores_of(n, q, stride, table, keys, a.head_dim, scores, ahead_keys, begin, n_pages)

        is_plain = n_pages - begin == _PAGES and not (a.softcap > 0 or a.slopes or a.bias or values_in_keys)
        for token in range(n_tokens):
            own = cell + token
            n_after = max(a.n_after, rows[first_row + token].n_ahead)
            seen = min(end, own + 1 + n_after) - start
            nearest = _first_of_span(a, first_row + token, first_cell)
            unseen = first_seen(own, a.window, a.chunk, nearest) - start
            is_whole = is_plain and seen >= TILE and unseen <= 0
            for head in range(first_head, first_head + heads):
                i = token * heads + head - first_head
                row_scores, row_ends, sums = scores + ROW_SCORES * i, ends + 4 * i, out + i * out_stride
                if in_tiles:
                    if not is_whole:
                        adjust_row(args, row_scores, head, start, own, seen, unseen, begin, n_pages)
                    continue
                if is_whole:
                    weigh_tile(row_scores, row_ends, sums, out_stride)
                    continue
                largest = adjust_row(args, row_scores, head, start, own, seen, unseen, begin, n_pages)
                new_max = max(simd.read_f32(row_ends + max_at), simd.max_f32(largest))
                total, highest = zero, simd.splat(new_max)
                for page in range(begin, n_pages):
                    at = row_scores + 4 * PAGE * page
                    p = simd.exp(simd.sub(simd.load(at), highest))
                    p = simd.first_lanes(p, seen - page * PAGE, zero)
                    if unseen > page * PAGE:
                        p = simd.first_lanes(zero, unseen - page * PAGE, p)
                    simd.store(at, p)
                    total = simd.add(total, p)
                    if values_in_keys:
                        to_relative_weights(k_type, at)
                rescale_row(sums, out_stride, row_ends, new_max, total)

        if in_tiles:
            attention_tiles.weigh(scores, ends + max_at, ends + sum_at, out, out_stride, out_stride // (4 * PAGE))
            rounded_values = rounded_keys + rounded_key_bytes(a.head_dim)
            attention_tiles.add_values(scores, rounded_values, n_dims, out, out_stride)
            return
        if values_in_keys:
            keys_of(
                n, scores, table, keys, begin, n_pages, n_seen - start, n_dims, a.head_dim, out, out_stride,
            )  # fmt: skip
            return
        values_of(
            n, scores, table, values, n_dims, out, out_stride, ahead_values, begin, n_pages, n_seen - start,
        )  # fmt: skip

    @njit
    def add_chunk(total: Any, ends: Any, out: Any, own: Any, weight: Any, out_stride: Any) -> None:
        """Add a row's sums of a chunk to its totals.

        `own` is its largest score there, `weight` the sum of its weights.
        """
        if weight == np.float32(0):  # no cell seen
            return
        before = simd.read_f32(ends + total_max_at)
        largest = max(before, own)
        old, new = simd.exp(simd.splat(before - largest)), simd.exp(simd.splat(own - largest))
        for at in range(0, out_stride, 4 * PAGE):
            sums = simd.mul(simd.load(total + at), old)
            simd.store(total + at, simd.fma(simd.load(out + at), new, sums))
        weights = simd.mul(simd.splat(simd.read_f32(ends + total_sum_at)), old)
        simd.write_f32(ends + total_sum_at, simd.max_f32(simd.fma(simd.splat(weight), new, weights)))
        simd.write_f32(ends + total_max_at, largest)

    @njit
    def write_row(args: Any, total: Any, ends: Any, row: Any, head: Any) -> None:
        """Write one head of a row of the output."""
        a = carray(simd.pointer(args), 1, ATTENTION)[0]
        inverse_sum = np.float32(1) / simd.read_f32(ends + total_sum_at)
        if rotates_out:
            n_dims = dims_of_sums(a.head_dim, a.value_dim)
            cells.rotate(total, n_dims, a.head_dim if values_in_keys else n_dims)
        target = a.out + row * a.out_stride + 4 * head * a.value_dim
        _scaled(total, inverse_sum, target, a.value_dim)

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
        n_heads = min(a.group, max_rows)
        n_tokens, n_parts = max_rows // n_heads, -(-a.group // n_heads)
        stride, out_stride = query_stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        own_out, own_total = max_rows * stride, max_rows * (stride + out_stride)
        own_ends = own_total + max_rows * out_stride
        state_bytes = own_ends + max_rows * _ENDS
        entry = out_stride + _PARTIAL_ENDS
        scores = scratch + a.scratch_stride - rest_bytes(a.head_dim, a.value_dim)
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
                    if in_tiles:
                        round_tile(args, run, scores + max_rows * ROW_SCORES, tile * TILE, row, last_row, head_kv)
                add_tile(
                    args, run, state, scores, tile * TILE, row, count, head_kv, first_head, heads, turn, n_kv,
                )  # fmt: skip
                if tile < last_tile - 1 and (tile + 1) % _CHUNK:
                    continue
                for i in range(count * heads):
                    out, total = state + own_out + i * out_stride, state + own_total + i * out_stride
                    ends, head = state + own_ends + 4 * i, first_head + i % heads
                    own, weight = simd.read_f32(ends + max_at), simd.read_f32(ends + sum_at)
                    if partials:
                        place = (row + i // heads - first_row) * a.n_head_kv * a.group + head
                        place = partials + (place * n_chunks + chunk) * entry
                        for at in range(0, out_stride, 4 * PAGE):
                            simd.store(place + at, simd.load(out + at))
                        simd.write_f32(place + out_stride, own)
                        simd.write_f32(place + out_stride + 4, weight)
                        continue
                    add_chunk(total, ends, out, own, weight, out_stride)
                    for at in range(0, out_stride, 4 * PAGE):
                        simd.store(out + at, zero)
                    simd.write_f32(ends + max_at, np.float32(LOWEST))
                    simd.write_f32(ends + sum_at, np.float32(0))
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
                    total, ends = state + own_total + i * out_stride, state + own_ends + 4 * i
                    place = partials + ((row - first_row) * a.n_head_kv * a.group + head) * n_chunks * entry
                    for sums in range(place, place + n_chunks * entry, entry):
                        own, weight = simd.read_f32(sums + out_stride), simd.read_f32(sums + out_stride + 4)
                        add_chunk(total, ends, sums, own, weight, out_stride)
                    write_row(args, total, ends, row, head)

    def attention(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        n_heads = min(a.group, max_rows)
        n_tokens, n_units = max_rows // n_heads, a.n_head_kv * -(-a.group // n_heads)
        stride, out_stride = query_stride(a.head_dim), _stride(dims_of_sums(a.head_dim, a.value_dim))
        state_bytes = max_rows * (stride + 2 * out_stride + _ENDS)
        most = (a.scratch_stride - rest_bytes(a.head_dim, a.value_dim)) // state_bytes
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
            room -= (end - row) * a.n_head_kv * a.group * n_chunks * (out_stride + _PARTIAL_ENDS)
            row = end
        if room < 0:
            is_split = False
        # A thread takes the units that begin in its share of the work.
        begin, stop = thread * work // n_threads, (thread + 1) * work // n_threads
        if in_tiles:
            configure(attention_tiles.ROWS)
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
                partials += (end - row) * a.n_head_kv * a.group * n_chunks * (out_stride + _PARTIAL_ENDS)
            row = end
        if in_tiles:
            release()

    kind = f"_latent_{kv_type.k}" if values_in_keys else f"_{kv_type}"
    return Kernel(attention, f"{kind}_tiles" if in_tiles else kind)

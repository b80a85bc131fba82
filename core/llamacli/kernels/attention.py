"""Attention over the pages of a KV cache.

The keys that a row of queries sees are gone through in tiles of TILE positions with an online softmax (Milakov and
Gimelshein 2018, Dao et al. 2022). Tiles lie at fixed positions, so a token's result is the same bits whether it is
evaluated alone or with others. Up to MOST rows of queries that share a head of keys and values go together: the heads
of a group, and in a prompt several tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from llamacli.kernels import ir, simd
from llamacli.kernels.elementwise import capped, share
from llamacli.kernels.jit import ROW, RUN, Kernel, record
from llamacli.kv import PAGE

STORE = record("k", "v", "stride", "layer", "n_head_kv", "head_dim")
ATTENTION = record(
    "q", "out", "stride", "layer", "n_head_kv", "group", "head_dim", "scratch", "scratch_stride", "window", "sinks",
    scale=np.float32, softcap=np.float32,
)  # fmt: skip
"""`group` heads of queries share a head of keys and values; `scratch` is `scratch_stride` bytes for each thread.
A token sees `window` positions, its own included. `sinks`, float32 [n_head], and `softcap` may be 0."""

TILE = 64
MOST = 8
_LOWEST = -3.0e38
_PAGES = TILE // PAGE
_SIZE = {"f32": 4, "f16": 2}
_LAYER = 24  # bytes of a layer's entry in KVSequence.addresses
_i64 = types.int64


def scratch_bytes(head_dim: int) -> int:
    """Bytes of scratch that one thread needs: rows of queries, scores and sums, then a maximum and a sum a row."""
    return 4 * MOST * (2 * _padded(head_dim) + TILE + 2)


def _padded(head_dim: int) -> int:
    return -(-head_dim // PAGE) * PAGE


def _load(b: ir.Builder, n_bytes: int, address: ir.Value) -> ir.Value:
    return ir.load_f16(b, address) if n_bytes == 2 else ir.load(b, address, ir.F32X16)


@intrinsic(prefer_literal=True)
def _scores(typingctx: Any, size: Any, n: Any, q: Any, q_stride: Any, keys: Any, head_dim: Any, out: Any) -> Any:
    """n rows of queries times one page of keys [head_dim][PAGE]; to out, rows of TILE scores. Size and n: literals."""
    n_rows, n_bytes = n.literal_value, size.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, q, q_stride, keys, head_dim, out = args
        rows = [b.add(q, b.mul(q_stride, ir.I64(row))) for row in range(n_rows)]

        def body(d: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            key = _load(b, n_bytes, b.add(keys, b.mul(d, ir.I64(PAGE * n_bytes))))
            at = b.mul(d, ir.I64(4))
            return [
                ir.fma(b, ir.broadcast_f32(b, b.add(row, at)), key, total)
                for row, total in zip(rows, totals, strict=True)
            ]

        totals = ir.loop(b, head_dim, [ir.constant(ir.F32X16, 0.0)] * n_rows, body)
        for row, total in enumerate(totals):
            ir.store(b, ir.offset(b, out, 4 * TILE * row), total)
        return context.get_dummy_value()

    return types.void(size, n, *[_i64] * 5), codegen


@intrinsic(prefer_literal=True)
def _weigh(typingctx: Any, size: Any, n: Any, p: Any, values: Any, row_bytes: Any, n_keys: Any, out: Any,
           out_stride: Any) -> Any:  # fmt: skip
    """Add to 16 columns of n rows of `out` the values of up to TILE keys, `row_bytes` apart, weighted by rows of p."""
    n_rows, n_bytes = n.literal_value, size.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, p, values, row_bytes, n_keys, out, out_stride = args
        places = [b.add(out, b.mul(out_stride, ir.I64(row))) for row in range(n_rows)]

        def body(key: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            value = _load(b, n_bytes, b.add(values, b.mul(key, row_bytes)))
            at = b.add(p, b.mul(key, ir.I64(4)))
            return [
                ir.fma(b, ir.broadcast_f32(b, ir.offset(b, at, 4 * TILE * row)), value, total)
                for row, total in enumerate(totals)
            ]

        totals = ir.loop(b, n_keys, [ir.load(b, place, ir.F32X16) for place in places], body)
        for place, total in zip(places, totals, strict=True):
            ir.store(b, place, total)
        return context.get_dummy_value()

    return types.void(size, n, *[_i64] * 6), codegen


@njit(inline="always")
def _page_of(kv: Any, layer: Any, cell: Any) -> Any:
    """The address of the page that a cell of a layer is in."""
    return simd.read_i64(simd.read_i64(kv + _LAYER * layer) + 8 * (cell // PAGE))


@functools.cache
def store_kv(kv_type: str) -> Kernel:
    """The kernel that puts new keys and values into pages of this type; a head of a token is a unit of work."""
    size = _SIZE[kv_type]

    def store_kv(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, STORE)[0], carray(simd.pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_head_kv, thread, n_threads)
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        head_bytes = PAGE * a.head_dim * size
        for unit in range(first, last):
            row, head = r.first_row + unit // a.n_head_kv, unit % a.n_head_kv
            place = row * a.stride + 4 * head * a.head_dim
            token = rows[row]
            lane = token.cell % PAGE
            corner = _page_of(token.kv, a.layer, token.cell) + head * head_bytes
            keys = corner + simd.read_i64(token.kv + _LAYER * a.layer + 8)
            values = corner + simd.read_i64(token.kv + _LAYER * a.layer + 16)
            for d in range(a.head_dim):
                key, value = simd.read_f32(a.k + place + 4 * d), simd.read_f32(a.v + place + 4 * d)
                at_key, at_value = keys + (d * PAGE + lane) * size, values + (lane * a.head_dim + d) * size
                if size == 2:
                    simd.write_f16(at_key, key)
                    simd.write_f16(at_value, value)
                else:
                    simd.write_f32(at_key, key)
                    simd.write_f32(at_value, value)

    return Kernel(store_kv, f"_{kv_type}")


@functools.cache
def attention(kv_type: str) -> Kernel:
    """The kernel of attention over pages of this type."""
    size = _SIZE[kv_type]

    def attention(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, ATTENTION)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        head_bytes, value_bytes = PAGE * a.head_dim * size, a.head_dim * size
        stride = 4 * (-(-a.head_dim // PAGE) * PAGE)
        q = a.scratch + thread * a.scratch_stride
        out = q + MOST * stride
        scores = out + MOST * stride
        top = carray(simd.pointer(scores + 4 * MOST * TILE), MOST, np.float32)
        mass = carray(simd.pointer(scores + 4 * MOST * (TILE + 1)), MOST, np.float32)
        zero, lowest = simd.splat(np.float32(0)), simd.splat(np.float32(_LOWEST))

        # A unit of work is some tokens and, of one head of keys, some heads of the group: MOST rows of queries at most.
        n_heads = min(a.group, MOST)
        n_parts = -(-a.group // n_heads)
        n_tokens = MOST // n_heads
        a_token = a.n_head_kv * n_parts
        for unit in range(thread, -(-(r.n_rows - r.first_row) // n_tokens) * a_token, n_threads):
            unit_row = r.first_row + unit // a_token * n_tokens
            unit_end = min(unit_row + n_tokens, r.n_rows)
            head_kv, first_head = unit % a_token // n_parts, unit % n_parts * n_heads
            heads = min(n_heads, a.group - first_head)
            while unit_row < unit_end:  # tokens of different sequences cannot go together
                first_row, last_row = unit_row, unit_row + 1
                kv, cell = rows[first_row].kv, rows[first_row].cell
                while last_row < unit_end and rows[last_row].kv == kv:
                    last_row += 1
                unit_row = last_row
                n = (last_row - first_row) * heads
                table = simd.read_i64(kv + _LAYER * a.layer)
                keys = simd.read_i64(kv + _LAYER * a.layer + 8) + head_kv * head_bytes
                values = simd.read_i64(kv + _LAYER * a.layer + 16) + head_kv * head_bytes
                for i in range(n):
                    head = head_kv * a.group + first_head + i % heads
                    source = (first_row + i // heads) * a.stride + 4 * head * a.head_dim
                    for d in range(a.head_dim):
                        simd.write_f32(q + i * stride + 4 * d, simd.read_f32(a.q + source + 4 * d) * a.scale)
                    for at in range(0, stride, 4 * PAGE):
                        simd.store(out + i * stride + at, zero)
                    top[i], mass[i] = np.float32(_LOWEST), np.float32(0)
                    if a.sinks:
                        top[i], mass[i] = simd.read_f32(a.sinks + 4 * head), np.float32(1)

                n_seen = cell + last_row - first_row
                first_page = max(0, cell + 1 - a.window) // PAGE
                for start in range(first_page * PAGE // TILE * TILE, n_seen, TILE):
                    begin = max(0, first_page - start // PAGE)
                    n_pages = min(_PAGES, -(-(n_seen - start) // PAGE))
                    for page in range(begin, n_pages):
                        corner = simd.read_i64(table + 8 * (start // PAGE + page)) + keys
                        at = scores + 4 * PAGE * page
                        if n > 4:
                            _scores(size, 8, q, stride, corner, a.head_dim, at)
                        elif n > 2:
                            _scores(size, 4, q, stride, corner, a.head_dim, at)
                        elif n > 1:
                            _scores(size, 2, q, stride, corner, a.head_dim, at)
                        else:
                            _scores(size, 1, q, stride, corner, a.head_dim, at)

                    for i in range(n):
                        seen = cell + i // heads + 1 - start
                        unseen = seen - a.window
                        largest = lowest
                        for page in range(begin, n_pages):
                            at = scores + 4 * (i * TILE + page * PAGE)
                            score = simd.load(at)
                            if a.softcap > 0:
                                score = capped(score, a.softcap)
                            score = simd.first_lanes(score, seen - page * PAGE, lowest)
                            if unseen > page * PAGE:
                                score = simd.first_lanes(lowest, unseen - page * PAGE, score)
                            simd.store(at, score)
                            largest = simd.maximum(score, largest)
                        new_top = max(top[i], simd.max_f32(largest))
                        total, highest = zero, simd.splat(new_top)
                        for page in range(begin, n_pages):
                            at = scores + 4 * (i * TILE + page * PAGE)
                            p = simd.exp(simd.sub(simd.load(at), highest))
                            p = simd.first_lanes(p, seen - page * PAGE, zero)
                            if unseen > page * PAGE:
                                p = simd.first_lanes(zero, unseen - page * PAGE, p)
                            simd.store(at, p)
                            total = simd.add(total, p)
                        if new_top > top[i]:
                            fade = simd.exp(simd.splat(top[i] - new_top))
                            for at in range(0, stride, 4 * PAGE):
                                place = out + i * stride + at
                                simd.store(place, simd.mul(simd.load(place), fade))
                            mass[i] *= simd.max_f32(fade)
                            top[i] = new_top
                        mass[i] += simd.sum_f32(total)

                    for page in range(begin, n_pages):
                        corner = simd.read_i64(table + 8 * (start // PAGE + page)) + values
                        p = scores + 4 * PAGE * page
                        for column in range(0, a.head_dim, PAGE):
                            value, place = corner + column * size, out + 4 * column
                            if n > 4:
                                _weigh(size, 8, p, value, value_bytes, PAGE, place, stride)
                            elif n > 2:
                                _weigh(size, 4, p, value, value_bytes, PAGE, place, stride)
                            elif n > 1:
                                _weigh(size, 2, p, value, value_bytes, PAGE, place, stride)
                            else:
                                _weigh(size, 1, p, value, value_bytes, PAGE, place, stride)

                for i in range(n):
                    head = head_kv * a.group + first_head + i % heads
                    target = (first_row + i // heads) * a.stride + 4 * head * a.head_dim
                    whole = np.float32(1) / mass[i]
                    for d in range(a.head_dim):
                        simd.write_f32(a.out + target + 4 * d, simd.read_f32(out + i * stride + 4 * d) * whole)

    return Kernel(attention, f"_{kv_type}")

"""Kernels of sparse attention: choice of cells, and attention to them.

A choice is a row of float32 numbers of blocks of cells, in ascending order, then -1. A head of a row is a unit of work,
so a token's result does not depend on how a prompt is divided, nor on threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels import simd
from llamacli.kernels.cached import cache_kernel
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.heads import copy_f32
from llamacli.kernels.jit import Kernel
from llamacli.kernels.kv_types.types import KVType
from llamacli.kernels.layout import CACHE_FIELDS, LANES, record

SELECT = record(
    "q", "q_stride", "weights", "weights_stride", "out", "out_stride", "n_query", "n_chosen", "block", "n_local",
    "pooled", *CACHE_FIELDS,
)  # fmt: skip
"""`n_query` heads of queries score the cells for each head; `weights`, float32 [n_query * n_head] a row, may be 0."""

SELECTED_ATTENTION = record(
    "q", "q_stride", "chosen", "chosen_stride", "n_chosen", "per_head", "out", "out_stride", "block", "sinks",
    *CACHE_FIELDS, scale=np.float32,
)  # fmt: skip
"""`chosen` are `n_chosen` blocks for all heads, or with `per_head` for each head of keys; `sinks` may be 0."""


@njit(inline="always")
def _dot(x: Any, y: Any, n: Any) -> Any:
    """Dot product of rows of whole vectors."""
    total = simd.splat(np.float32(0))
    for at in range(0, 4 * n, 4 * LANES):
        total = simd.fma(simd.load(x + at), simd.load(y + at), total)
    return simd.sum_f32(total)


@njit
def _sift(scores: Any, blocks: Any, i: Any, n: Any) -> None:
    """Sift item i of a heap down.

    The root has the least score, of equals the last block.
    """
    while 2 * i + 1 < n:
        least = i
        for child in range(2 * i + 1, min(2 * i + 3, n)):
            if scores[child] < scores[least] or (scores[child] == scores[least] and blocks[child] > blocks[least]):
                least = child
        if least == i:
            return
        scores[i], scores[least] = scores[least], scores[i]
        blocks[i], blocks[least] = blocks[least], blocks[i]
        i = least


@njit
def _sort(scores: Any, blocks: Any) -> None:
    """Sort blocks in ascending order, by a heap; scores are overwritten."""
    n = len(blocks)
    for i in range(n):
        scores[i] = -blocks[i]
    for i in range(n // 2 - 1, -1, -1):
        _sift(scores, blocks, i, n)
    for last in range(n - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        blocks[0], blocks[last] = blocks[last], blocks[0]
        _sift(scores, blocks, 0, last)


@njit
def _score(a: Any, row: Any, head: Any, key: Any) -> Any:
    """Score of one cell.

    With weights, the weighted sum of the queries' positive products.
    """
    q = a.q + row * a.q_stride + 4 * head * a.n_query * a.head_dim
    total = np.float32(0)
    for i in range(a.n_query):
        product = _dot(q + 4 * i * a.head_dim, key, a.head_dim)
        if a.weights:
            weight = simd.read_f32(a.weights + row * a.weights_stride + 4 * (head * a.n_query + i))
            product = weight * max(product, np.float32(0))
        total += product
    return total


@functools.cache
def select() -> Callable[[KVType], Kernel]:
    """Kernels that choose the best blocks of cells for each head."""

    def attend(a, row, head, cells, key, value):  # type: ignore[no-untyped-def]
        all_chosen = simd.pointer(a.out + row * a.out_stride + 4 * head * a.n_chosen)
        n_chosen, out = a.n_chosen, carray(all_chosen, a.n_chosen, np.float32)
        if a.pooled and cells.last % a.block == 0:  # no block is incomplete
            n_chosen -= 1
            out[n_chosen] = -1
        out = carray(all_chosen, n_chosen, np.float32)
        begin, end = cells.first // a.block, (cells.last - 1) // a.block + 1
        if end - begin <= n_chosen:
            for i in range(n_chosen):
                out[i] = begin + i if begin + i < end else -1
            return
        scores = carray(simd.pointer(cells.memory), n_chosen, np.float32)
        for block in range(begin, end):
            score = np.float32(np.inf)
            after = (block + 1) * a.block
            if block <= cells.own // a.block - a.n_local and (after <= cells.last or not a.pooled):
                score = np.float32(-np.inf)
                before = after - 1 if a.pooled else max(cells.first, block * a.block)
                for cell in range(before, min(cells.last, after)):
                    score = max(score, _score(a, row, head, key(cells, cell)))
            number = block - begin
            if number < n_chosen:
                scores[number], out[number] = score, block
                if number == n_chosen - 1:
                    for i in range(n_chosen // 2 - 1, -1, -1):
                        _sift(scores, out, i, n_chosen)
            elif score > scores[0]:
                scores[0], out[0] = score, block
                _sift(scores, out, 0, n_chosen)
        _sort(scores, out)

    return cache_kernel("select", SELECT, attend)


@functools.cache
def selected_attention() -> Callable[[KVType], Kernel]:
    """Kernels of attention to chosen blocks of cells, with an online softmax."""

    def attend(a, row, head, cells, key, value):  # type: ignore[no-untyped-def]
        n_q, n_v = -(-a.head_dim // LANES) * LANES, -(-a.value_dim // LANES) * LANES
        q, sums = cells.memory, cells.memory + 4 * n_q
        for at in range(4 * (n_q - LANES), 4 * (n_q + n_v), 4 * LANES):
            simd.store(q + at, simd.splat(np.float32(0)))
        copy_f32(a.q + row * a.q_stride + 4 * head * a.head_dim, q, a.head_dim)
        chosen = a.chosen + row * a.chosen_stride
        if a.per_head:
            chosen += 4 * (head // (a.n_head // a.n_head_kv)) * a.n_chosen
        top, total = np.float32(-np.inf), np.float32(0)
        if a.sinks:
            top, total = simd.read_f32(a.sinks + 4 * head), np.float32(1)
        for i in range(a.n_chosen):
            block = np.int64(simd.read_f32(chosen + 4 * i))
            if block < 0:
                break
            for cell in range(max(cells.first, block * a.block), min(cells.last, (block + 1) * a.block)):
                score = a.scale * _dot(q, key(cells, cell), n_q)
                if score > top:
                    shrunk = np.exp(top - score)
                    total *= shrunk
                    for at in range(0, 4 * n_v, 4 * LANES):
                        simd.store(sums + at, simd.mul(simd.load(sums + at), simd.splat(shrunk)))
                    top = score
                weight = np.exp(score - top)
                total += weight
                row_of = value(cells, cell)
                for at in range(0, 4 * n_v, 4 * LANES):
                    simd.store(sums + at, simd.fma(simd.splat(weight), simd.load(row_of + at), simd.load(sums + at)))
        out = a.out + row * a.out_stride + 4 * head * a.value_dim
        for d in range(a.value_dim):
            simd.write_f32(out + 4 * d, simd.read_f32(sums + 4 * d) / total)

    return cache_kernel("selected_attention", SELECTED_ATTENTION, attend)

"""Sparse attention: an indexer chooses the cells that attention reads.

A lightning indexer (arXiv:2512.02556) scores single cells, others score blocks of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.layout import LANES
from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.cached import CacheOp
from llamacli.ops.linear import linear
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.moe import softmax
from llamacli.ops.run import Run
from llamacli.ops.store import KeyValues, store
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class Selection:
    """Handle of chosen cells, which `attention` reads.

    `chosen` are numbers of blocks of `block` cells, ascending, then -1: as many for each of `n_head` choices.
    """

    chosen: Value
    block: int
    n_head: int


@attrs.frozen(eq=False)
class Select(CacheOp):
    """Choice op: the blocks of cells of the largest scores.

    `n_chosen` of them, for each of `n_head` choices.
    The score of a block is the largest of its cells. That of a cell is the sum of the products of its key with the
    choice's queries, or with `weights` their weighted sum, of which negative ones count as 0. The last `n_local`
    blocks are always among the chosen. With `pooled`, the score of a block is the score of its last cell, and an
    incomplete block is chosen beside the others. Equal scores: the lower number first.
    """

    q: Value
    weights: Value | None
    n_head: int
    n_chosen: int
    block: int
    n_local: int
    pooled: bool

    def attend(self, run: Run, i: int, first: int, keys: Array, values: Array) -> npt.NDArray[Any]:
        last = first + keys.shape[1]
        numbers = np.arange(first // self.block, (last - 1) // self.block + 1)
        out = np.full((self.n_head, self.n_chosen), -1.0)
        n_chosen = self.n_chosen - (self.pooled and last % self.block == 0)
        if len(numbers) <= n_chosen:
            out[:, : len(numbers)] = numbers
            return out.reshape(-1)
        products = run[self.q][i].reshape(self.n_head, -1, keys.shape[2]) @ keys[0].T
        if self.weights:
            products = run[self.weights][i].reshape(self.n_head, -1, 1) * np.maximum(products, 0)
        scores = products.sum(axis=1)
        if self.pooled:
            best = scores[:, np.minimum((numbers + 1) * self.block, last) - 1 - first].astype(np.float32)
            best[:, (numbers + 1) * self.block > last] = np.inf
        else:
            edges = np.maximum(numbers * self.block - first, 0)
            best = np.maximum.reduceat(scores, edges, axis=1).astype(np.float32)  # kernels compare them in float32
        best[:, numbers > (run.start + i) // self.block - self.n_local] = np.inf
        order = np.argsort(-best, axis=1, kind="stable")[:, :n_chosen]
        out[:, :n_chosen] = np.sort(numbers[order], axis=1)
        return out.reshape(-1)

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels.selection import SELECT, select

        n_query = self.q.width // self.n_head // to.states[self.layer].head_dim
        params = self.cache_params(to, self.n_head, self.n_chosen)
        to.step(
            select(), SELECT, **params, q=f32(self.q), weights=f32(self.weights) if self.weights else None,
            out=f32(self.out), n_query=n_query, n_chosen=self.n_chosen, block=self.block, n_local=self.n_local,
            pooled=self.pooled,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        weights, key = linear(g, x, param("weights", x.width // 16, x.width)), linear(g, x, param("key", 16, x.width))
        kv = store(g, key, None, head_dim=16)
        yield select(g, x, kv, 5, weights=weights).chosen
        yield select(g, x, kv, 2, n_head=x.width // 16, block=3, n_local=1).chosen
        yield select(g, x, kv, 2, weights=weights, block=3, pooled=True).chosen


@attrs.frozen(eq=False)
class SelectedAttention(CacheOp):
    """Attention op over chosen cells: softmax(scale * q k^T) v of these.

    `sinks`, one number a head, are logits of one more position, whose value is zero.
    """

    q: Value
    chosen: Value
    n_choices: int
    block: int
    scale: float
    sinks: Tensor | None

    def attend(self, run: Run, i: int, first: int, keys: Array, values: Array) -> npt.NDArray[Any]:
        blocks = np.arange(first, first + keys.shape[1]) // self.block
        queries, out = run[self.q][i].reshape(len(keys), -1, keys.shape[2]), []
        choices = run[self.chosen][i].reshape(self.n_choices, -1)
        sinks = run[self.sinks].reshape(len(keys), -1, 1) if self.sinks else np.full((*queries.shape[:2], 1), -np.inf)
        for head, heads in enumerate(queries):
            seen = np.isin(blocks, choices[head if self.n_choices > 1 else 0])
            scores = np.hstack([self.scale * heads @ keys[head, seen].T, sinks[head]])
            weights = softmax(scores)[:, :-1]
            out.append(weights @ values[head, seen])
        return np.array(out).reshape(-1)

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels.attention import padded
        from llamacli.kernels.selection import SELECTED_ATTENTION, selected_attention

        state = to.states[self.layer]
        n_numbers = padded(state.head_dim) + padded(state.value_dim)
        params = self.cache_params(to, self.q.width // state.head_dim, n_numbers)
        to.step(
            selected_attention(), SELECTED_ATTENTION, **params, q=f32(self.q), chosen=f32(self.chosen),
            n_chosen=self.chosen.width // self.n_choices, per_head=self.n_choices > 1, out=f32(self.out),
            block=self.block, scale=self.scale, sinks=to.vector(self.sinks) if self.sinks else None,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        weights, key = linear(g, x, param("weights", x.width // 16, x.width)), linear(g, x, param("key", 16, x.width))
        cells = select(g, x, store(g, key, None, head_dim=16), 5, weights=weights)
        yield selected_attention(g, x, store(g, x, None, head_dim=x.width, value_dim=20), 0.3, cells)
        sinks = param("sinks", x.width // 16)
        yield selected_attention(g, x, store(g, x, x, head_dim=16), 0.3, cells, sinks)
        blocks = select(g, x, store(g, key, None, head_dim=16), 2, n_head=x.width // 16, block=3, n_local=1)
        yield selected_attention(g, x, store(g, x, x, head_dim=16), 0.3, blocks)


def select(
    g: Recorder,
    q: Value,
    kv: KeyValues,
    n: int,
    *,
    weights: Value | None = None,
    n_head: int = 1,
    block: int = 1,
    n_local: int = 0,
    pooled: bool = False,
) -> Selection:
    """Record the choice of the cells that attention reads: sparse attention.

    An indexer's queries `q` score the cells by its keys, `kv`, of one head (`g.store(k, None, head_dim=)`). The `n`
    cells of the largest scores are chosen, for `n_head` choices by as many equal parts of q. With `weights`, a number a
    query, products below zero count as 0 and the others are multiplied by them (lightning indexer, arXiv:2512.02556).
    With `block`, cells are chosen by blocks of as many positions, whose score is the largest of their cells;
    the last `n_local` blocks always are. With `pooled`, the key of the last cell is the key of a block, and an
    incomplete block is chosen too, beside `n` others. `attention(cells=)` reads the choice; layers may share one.
    Where no more are seen than are chosen, no score is computed.

    Formula: `top_n(max over a block of sum_h(weights[h] * max(0, q[h] @ k)))`
    Shapes: q [n, n_head * n_query * head_dim], weights [n, n_head * n_query]; returns the handle that `attention` reads
    Limits: head_dim is a multiple of 16; kv has one head, and with `pooled` no window; n_local <= n
    Example: `cells = g.select(q_index, g.store(k_index, None, head_dim=128), 2048, weights=weights)`
    """
    state = kv.state
    expect("select", state.n_head_kv == 1, f"{state.n_head_kv} heads of keys and choices by one")
    expect("select", state.head_dim % LANES == 0, f"keys of {state.head_dim} numbers and multiples of {LANES}")
    fits = n_head > 0 and q.width % (n_head * state.head_dim) == 0
    expect("select", fits, f"q of width {q.width}, {n_head} choices and keys of {state.head_dim} numbers")
    expect("select", n > 0 and block > 0 and 0 <= n_local <= n, f"{n} blocks of {block}, {n_local} of them local")
    n_query = q.width // state.head_dim
    expect("select", weights is None or weights.width == n_query, f"weights and {n_query} heads of queries")
    expect("select", not pooled or state.window is state.chunk is None, f"pooled blocks and window {state.window}")
    n += pooled
    chosen = g.record(Select(g.value(n_head * n), kv.layer, q, weights, n_head, n, block, n_local, pooled))
    return Selection(chosen, block, n_head)


def selected_attention(
    g: Recorder, q: Value, kv: KeyValues, scale: float, cells: Selection, sinks: Param | None = None
) -> Value:
    """Record attention over chosen cells."""
    state, n_head = kv.state, q.width // kv.state.head_dim
    fits = cells.n_head in (1, state.n_head_kv)
    expect("attention", fits, f"{cells.n_head} choices of cells and {state.n_head_kv} heads of keys")
    out = g.value(n_head * state.value_dim)
    return g.record(
        SelectedAttention(
            out, kv.layer, q, cells.chosen, cells.n_head, cells.block, scale, sinks.weight if sinks else None
        )
    )

"""Pooled cells: one key for each block of tokens.

It is a mean of the tokens' keys, weighted by softmax in each channel, and is in the cell of the block's last token, so
that rewinding needs nothing. DeepSeek-AI 2026, Z.ai 2026.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import (
    CACHE_FIELDS,
    Array,
    CacheOp,
    Graph,
    Lowering,
    MakeParam,
    Param,
    Recorder,
    Run,
    Tensor,
    Value,
    expect,
    f32,
    record,
)

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

POOL = record("out", "out_stride", "bias", "bias_width", "block", "overlap", "width", *CACHE_FIELDS)
ATTEND = record(
    "q", "q_stride", "out", "out_stride", "chosen", "chosen_stride", "n_chosen", "sinks", "block", "n_recent",
    *CACHE_FIELDS, scale=np.float32,
)  # fmt: skip
"""`chosen` are blocks, then -1; all where it is 0."""


@attrs.frozen(eq=False)
class Pool(CacheOp):
    """Pooling op: one mean for each block of `block` cells.

    Keys of the cells are values and scores. The last token of a block has the mean of its values, weighted by softmax
    of scores + `bias`, (block, width); other tokens have zeros. With `overlap`, a mean is that of the first half of the
    channels of the block before, and of the second half of its own.
    """

    uses_position = True

    bias: Tensor
    block: int
    overlap: bool

    def attend(self, run: Run, i: int, first: int, keys: Array, values: Array) -> npt.NDArray[Any]:
        own, n, width = run.start + i, self.block, self.out.width
        if (own + 1) % n:
            return np.zeros(width)
        rows = keys[0, -2 * n if self.overlap else -n :]
        x, scores = np.split(rows, 2, axis=1)
        scores = scores + np.resize(run[self.bias], scores.shape)
        if self.overlap:
            x, scores = (np.vstack([part[:-n, :width], part[-n:, width:]]) for part in (x, scores))
        weights = np.exp(scores - scores.max(axis=0))
        return (weights * x).sum(axis=0) / weights.sum(axis=0)

    def lower(self, to: Lowering) -> None:
        width, bias = self.out.width, to.vector(self.bias).reshape(self.block, -1)
        to.step(
            pool_kernel(), POOL, **self.cache_params(to, 1, 2 * width), out=f32(self.out), bias=bias,
            bias_width=bias.shape[1], block=self.block, overlap=self.overlap, width=width,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield pooled(g, x, x, param("bias", 3, x.width), 3)
        yield pooled(g, x, x, param("bias_2", 2, x.width), 2, overlap=True)


@functools.cache
def pool_kernel() -> Callable[..., Kernel]:
    """Kernels of pooled blocks."""
    from llamacli.plugin import cache_kernel, carray, pointer

    def attend(a, row, head, cells, key, value):  # type: ignore[no-untyped-def]
        out = carray(pointer(a.out + row * a.out_stride), a.width, np.float32)
        out[:] = 0
        if (cells.own + 1) % a.block:
            return
        n_stored = a.head_dim // 2
        memory = carray(pointer(cells.memory), 2 * a.width, np.float32)
        top, total = memory[: a.width], memory[a.width :]
        top[:], total[:] = -np.inf, 0
        begin = cells.own + 1 - a.block
        for again in range(2):
            for cell in range(max(0, begin - a.overlap * a.block), cells.own + 1):
                at = a.width if a.overlap and cell >= begin else 0
                x = carray(pointer(key(cells, cell)), a.head_dim, np.float32)
                bias = carray(pointer(a.bias + 4 * (cell % a.block) * a.bias_width), n_stored, np.float32)
                for d in range(a.width):
                    score = x[n_stored + at + d] + bias[at + d]
                    if again:
                        weight = np.exp(score - top[d])
                        total[d] += weight
                        out[d] += weight * x[at + d]
                    else:
                        top[d] = max(top[d], score)
        for d in range(a.width):
            out[d] /= total[d]

    return cache_kernel("pool", POOL, attend)


def pooled(g: Graph | Recorder, x: Value, scores: Value, bias: Param, block: int, *, overlap: bool = False) -> Value:
    """Means of blocks of x, in the rows of their last tokens.

    `scores` + `bias`, (block, width), are the logits of their weights. With `overlap`, x has two parts: the first is
    for the block behind its own.
    """
    fits = x.width == scores.width and bias.weight.shape == (block, x.width) and (not overlap or x.width % 2 == 0)
    expect("pooled", fits, f"x of width {x.width}, scores of {scores.width} and {bias.weight.shape}")
    window = 2 * block if overlap else block
    kv = g.store(g.concat(x, scores), None, head_dim=2 * x.width, window=window)  # type: ignore[union-attr]
    return g.record(Pool(g.value(x.width // 2 if overlap else x.width), kv.layer, bias.weight, block, overlap))


@attrs.frozen(eq=False)
class PooledAttention(CacheOp):
    """Attention op over the last `n_recent` cells and pooled blocks.

    Keys are those of the cell and, if it is a block's last, of the block, side by side; values are the keys. `chosen`
    are the blocks to read, all without it. `sinks` are logits of one more position, whose value is zero.
    """

    q: Value
    chosen: Value | None
    sinks: Tensor
    block: int
    n_recent: int
    scale: float

    def attend(self, run: Run, i: int, first: int, keys: Array, values: Array) -> npt.NDArray[Any]:
        own, width = run.start + i, keys.shape[2] // 2
        blocks = np.arange((own + 1) // self.block)
        if self.chosen:
            blocks = blocks[np.isin(blocks, run[self.chosen][i])]
        recent = keys[0, max(0, own + 1 - self.n_recent) :, :width]
        rows = np.vstack([recent, keys[0, (blocks + 1) * self.block - 1, width:]])
        scores = self.scale * run[self.q][i].reshape(-1, width) @ rows.T
        scores = np.hstack([scores, run[self.sinks][:, None]])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return (weights[:, :-1] @ rows / weights.sum(axis=1, keepdims=True)).reshape(-1)

    def lower(self, to: Lowering) -> None:
        width = to.states[self.layer].head_dim // 2
        to.step(
            attention_kernel(), ATTEND, **self.cache_params(to, self.q.width // width, width), q=f32(self.q),
            out=f32(self.out), chosen=f32(self.chosen) if self.chosen else None,
            n_chosen=self.chosen.width if self.chosen else 0, sinks=to.vector(self.sinks), block=self.block,
            n_recent=self.n_recent, scale=self.scale,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        sinks = param("sinks", x.width // 16)
        k, queries = (g.linear(x, param(name, 16, x.width)) for name in ("k", "queries"))  # type: ignore[attr-defined]
        index = g.store(k, None, head_dim=16)  # type: ignore[attr-defined]
        cells = g.select(queries, index, 2, block=3, pooled=True)  # type: ignore[attr-defined]
        for chosen in (None, cells.chosen):
            yield pooled_attention(g, x, k, k, sinks, chosen=chosen, block=3, n_recent=5, scale=0.3)


@functools.cache
def attention_kernel() -> Callable[..., Kernel]:
    """Kernels of attention to recent cells and pooled blocks."""
    from llamacli.plugin import LANES, cache_kernel, simd

    def attend(a, row, head, cells, key, value):  # type: ignore[no-untyped-def]
        width = a.head_dim // 2
        q, sums = a.q + row * a.q_stride + 4 * head * width, cells.memory
        for at in range(0, 4 * width, 4 * LANES):
            simd.store(sums + at, simd.splat(np.float32(0)))
        top, total = simd.read_f32(a.sinks + 4 * head), np.float32(1)
        begin, n_blocks = max(0, cells.own + 1 - a.n_recent), (cells.own + 1) // a.block
        n_recent = cells.last - begin
        for i in range(n_recent + (a.n_chosen if a.chosen else n_blocks)):
            if i < n_recent:
                address = key(cells, begin + i)
            else:
                block = i - n_recent
                if a.chosen:
                    block = np.int64(simd.read_f32(a.chosen + row * a.chosen_stride + 4 * block))
                if block < 0 or block >= n_blocks:
                    continue
                address = key(cells, (block + 1) * a.block - 1) + 4 * width
            products = simd.splat(np.float32(0))
            for at in range(0, 4 * width, 4 * LANES):
                products = simd.fma(simd.load(q + at), simd.load(address + at), products)
            score = a.scale * simd.sum_f32(products)
            if score > top:
                shrunk = np.exp(top - score)
                total *= shrunk
                for at in range(0, 4 * width, 4 * LANES):
                    simd.store(sums + at, simd.mul(simd.load(sums + at), simd.splat(shrunk)))
                top = score
            weight = np.exp(score - top)
            total += weight
            for at in range(0, 4 * width, 4 * LANES):
                simd.store(sums + at, simd.fma(simd.splat(weight), simd.load(address + at), simd.load(sums + at)))
        out = a.out + row * a.out_stride + 4 * head * width
        for d in range(width):
            simd.write_f32(out + 4 * d, simd.read_f32(sums + 4 * d) / total)

    return cache_kernel("pooled_attention", ATTEND, attend)


def pooled_attention(
    g: Graph | Recorder,
    q: Value,
    k: Value,
    k_pooled: Value,
    sinks: Param,
    *,
    chosen: Value | None,
    block: int,
    n_recent: int,
    scale: float,
) -> Value:
    """Attention to the last `n_recent` keys and to pooled ones.

    Pooled keys are those of all blocks, or of the chosen ones. Values are keys.
    """
    width = k.width
    fits = width % 16 == 0 == q.width % width and k_pooled.width == width
    expect("pooled_attention", fits, f"q of width {q.width} and keys of {width} and {k_pooled.width}")
    expect("pooled_attention", sinks.weight.shape == (q.width // width,), f"{sinks.weight.name} and its heads")
    kv = g.store(g.concat(k, k_pooled), None, head_dim=2 * width)  # type: ignore[union-attr]
    return g.record(PooledAttention(g.value(q.width), kv.layer, q, chosen, sinks.weight, block, n_recent, scale))

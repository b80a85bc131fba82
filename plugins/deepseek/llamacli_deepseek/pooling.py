"""Pooled cells: one key for each block of tokens, a mean weighted by softmax in each channel.

The pooled key of a block is in the cell of its last token, so that rewinding needs nothing. DeepSeek-AI 2026, Z.ai 2026.
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

POOL = record("out", "out_stride", "bias", "block", "overlap", "width", *CACHE_FIELDS)


@attrs.frozen(eq=False)
class Pool(CacheOp):
    """Op of pooled blocks of `block` cells, whose keys are values and scores.

    The last token of a block has the mean of its values, weighted by softmax of scores + `bias`, (block, width); other
    tokens have zeros. With `overlap`, the first half of the channels is of the block before, the second of its own.
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
        width = self.out.width
        to.step(
            pool_kernel(), POOL, **self.cache_params(to, 1, 2 * width), out=f32(self.out), bias=to.vector(self.bias),
            block=self.block, overlap=self.overlap, width=width,
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
                bias = carray(pointer(a.bias + 4 * (cell % a.block) * n_stored), n_stored, np.float32)
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
    """Means of blocks of x, in the rows of their last tokens."""
    fits = x.width == scores.width and bias.weight.shape == (block, x.width) and (not overlap or x.width % 2 == 0)
    expect("pooled", fits, f"x of width {x.width}, scores of {scores.width} and {bias.weight.shape}")
    window = 2 * block if overlap else block
    kv = g.store(g.concat(x, scores), None, head_dim=2 * x.width, window=window)  # type: ignore[union-attr]
    return g.record(Pool(g.value(x.width // 2 if overlap else x.width), kv.layer, bias.weight, block, overlap))

"""Causal convolution within a block of tokens, with weights of each token."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import ROW, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.linear import linear
from llamacli.ops.lowering import Lowering, SlotColumns, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

BLOCK_CONV = record(
    "x", "x_stride", "base", "factors", "factors_stride", "out", "out_stride", "width", "n_taps", "n_groups"
)
"""`base`: float32 [n_taps, width]; `factors`: float32 [n_taps, n_groups] of the first row."""


@attrs.frozen(eq=False)
class BlockConv(Op):
    """Convolution op over the rows of a sequence in a batch.

    out[t] = sum over j of (base[j] + factors[t, j] of the group of columns) * x[t - j]; x is 0 before the batch.
    Weights have two sides, of which it has one.
    """

    mixes_tokens = True

    x: Value
    base: Tensor
    factors: Value
    side: int

    @property
    def needs_whole_input(self) -> bool:
        return True

    @property
    def n_groups(self) -> int:
        """Groups of columns, each with a factor."""
        n_sides, n_taps, _ = self.base.shape
        return self.factors.width // (n_sides * n_taps)

    def compute(self, run: Run) -> Array:
        x, (n_sides, n_taps, width) = run[self.x], self.base.shape
        factors = run[self.factors].reshape(run.n, n_sides, n_taps, self.n_groups)[:, self.side]
        weights = run[self.base][self.side] + np.repeat(factors, width // self.n_groups, axis=2)
        out = np.zeros_like(x)
        for j in range(min(n_taps, run.n)):
            out[j:] += weights[j:, j] * x[: run.n - j]
        return out

    def lower(self, to: Lowering) -> None:
        (_, n_taps, width), n_groups = self.base.shape, self.n_groups
        base = np.ascontiguousarray(to.vector(self.base)[self.side, :n_taps, :width])
        factors = SlotColumns(f32(self.factors), self.side * n_taps * n_groups)
        to.step(
            block_conv_kernel(), BLOCK_CONV, x=f32(self.x), base=to.memory(base), factors=factors, out=f32(self.out),
            width=width, n_taps=n_taps, n_groups=n_groups, work=float(n_taps * width),
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for side, n_taps, n_groups in ((0, 3, x.width // 4), (1, 2, 1)):
            factors = linear(g, x, param(f"factors{side}", 2 * n_taps * n_groups, x.width))
            yield block_conv(g, x, param(f"base{side}", 2, n_taps, x.width), factors, side)


def block_conv(g: Recorder, x: Value, base: Param, factors: Value, side: int) -> Value:
    """Record a causal convolution whose weights depend on the token.

    Of a block, the tokens of a sequence that are evaluated together. DFlash 2 has one before and one behind each
    branch: the sides of `base` and `factors`.

    Formula: `out[t, c] = sum((base[side, j, c] + factors[t, side, j, c // group]) * x[t - j, c])` over the taps j
    Shapes: x [n, width]; base (n_sides, n_taps, width); factors [n, n_sides * n_taps * n_groups], width = n_groups *
        group; out [n, width]
    Limits: draft heads that predict blocks only; x is 0 before the block
    Example: `h = g.block_conv(h, block.attn_conv_base, g.linear(h, block.attn_conv_proj), 0)`
    """
    weight = param_of("block_conv", base).weight
    fits = len(weight.shape) == 3 and weight.shape[2] == x.width and 0 <= side < weight.shape[0]
    n_groups, rest = divmod(factors.width, weight.shape[0] * weight.shape[1]) if fits else (0, 0)
    fits = n_groups > 0 and not rest and x.width % n_groups == 0
    expect("block_conv", fits, f"{weight.name} {weight.shape}, side {side} and widths {x.width} and {factors.width}")
    return g.record(BlockConv(g.value(x.width), x, weight, factors, side))


@functools.cache
def block_conv_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.kernels.api import LANES, Kernel, carray, pointer, share, simd

    def block_conv(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, BLOCK_CONV)[0], carray(pointer(run), 1, RUN)[0]
        rows, group = carray(pointer(r.rows), r.n_rows, ROW), a.width // a.n_groups
        base = carray(pointer(a.base), (a.n_taps, a.width), np.float32)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            n_taps = 0
            while n_taps < a.n_taps and row >= n_taps and rows[row - n_taps].kv == rows[row].kv:
                n_taps += 1
            factors = carray(pointer(a.factors + row * a.factors_stride), (a.n_taps, a.n_groups), np.float32)
            if group % LANES == 0:
                for i in range(0, a.width, LANES):
                    total = simd.splat(np.float32(0))
                    for j in range(n_taps):
                        weight = simd.add(simd.load(a.base + 4 * (j * a.width + i)), simd.splat(factors[j, i // group]))
                        total = simd.fma(weight, simd.load(a.x + (row - j) * a.x_stride + 4 * i), total)
                    simd.store(a.out + row * a.out_stride + 4 * i, total)
                continue
            out = carray(pointer(a.out + row * a.out_stride), a.width, np.float32)
            out[:] = 0
            for j in range(n_taps):
                x = carray(pointer(a.x + (row - j) * a.x_stride), a.width, np.float32)
                for k in range(a.n_groups):
                    for i in range(k * group, (k + 1) * group):
                        out[i] += (base[j, i] + factors[j, k]) * x[i]

    return Kernel(block_conv)

"""Batched matrix product: one matrix for each head.

out[h] = x[h] @ weight[h].T + bias[h]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import ACTIVATION_BLOCK, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.linear import low_rank_product, lower_linear, lower_low_rank, lower_scale, product
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Adapt, Array, LowRank, LowRanks, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

PAD_HEADS = record("x", "x_stride", "x_width", "out", "out_stride", "out_width", "n_heads")
"""Heads of `x_width` numbers to heads of `out_width`, of which the first are copied and the rest are zero."""


@attrs.frozen(eq=False)
class BatchedLinear(Op):
    """Batched linear op: out = x @ weight.T + bias for each head.

    Weight (n_head, n_out, n_in), bias (n_head, n_out). The weight has low-rank changes.
    """

    x: Value
    weight: Tensor
    bias: Tensor | None
    changes: LowRanks = ()

    def matrices(self) -> list[Tensor]:
        return [self.weight, *(tensor for change in self.changes for tensor in (change.a, change.b))]

    def adapted(self, adapt: Adapt) -> BatchedLinear:
        return attrs.evolve(self, changes=self.changes + adapt(self.weight))

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, len(run[self.weight]), -1)
        matrices = enumerate(run[self.weight])
        out = np.stack([product(heads[:, i], matrix, is_tiled=run.is_tiled) for i, matrix in matrices], axis=1)
        for change in self.changes:
            pairs = enumerate(zip(run[change.a], run[change.b], strict=True))
            parts = [low_rank_product(heads[:, i], a, b, run.scale_of(change)) for i, (a, b) in pairs]
            out = out + np.stack(parts, axis=1)
        return (out + run[self.bias] if self.bias else out).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        # Matrix kernels read and write whole blocks of activations, so heads of other widths are copied to some.
        n_heads, n_out, n_in = self.weight.shape
        x, out = f32(self.x), f32(self.out)
        if n_heads == 1:
            lower_linear(to, x, self.weight, out, self.bias)
            for change in self.changes:
                lower_low_rank(to, x, change, out)
            return
        wide_x, wide_out = self._wide("x", n_in), self._wide("out", n_out)
        source, target = (x if wide_x.width == x.width else wide_x), (out if wide_out.width == out.width else wide_out)
        if source is wide_x:
            _pad_heads(to, x, source, n_heads)
        lower_linear(to, source, self.weight, target, self.bias)
        for i, change in enumerate(self.changes):
            rank = change.a.shape[-2]
            wide_a, wide_b = self._wide(f"a{i}", rank), self._wide(f"b{i}", rank)
            narrow = Slot((self, f"narrow{i}"), "f32", n_heads * rank)
            lower_linear(to, source, change.a, wide_a)
            _pad_heads(to, wide_a, narrow, n_heads)
            _pad_heads(to, lower_scale(to, narrow, change), wide_b, n_heads)  # with zeros behind the rank
            lower_linear(to, wide_b, change.b, target, residual=target)
        if target is wide_out:
            _pad_heads(to, target, out, n_heads)

    def _wide(self, name: str, width: int) -> Slot:
        """Slot of whole blocks of activations for each head."""
        n_blocks = -(-width // ACTIVATION_BLOCK)
        return Slot((self, name), "f32", self.weight.shape[0] * n_blocks * ACTIVATION_BLOCK)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield batched_linear(g, x, param("heads", 2, 32, x.width // 2))
        yield batched_linear(g, x, param("narrow", 4, 5, x.width // 4, bias=True))
        for n_heads in (1, 2):
            weight, a, b = (param(f"{name}{n_heads}", n_heads, *shape).weight for name, shape in (
                ("adapted", (40, x.width // n_heads)), ("a", (3, x.width // n_heads)), ("b", (40, 3)),
            ))  # fmt: skip
            changes = LowRank(a, b, 0.5), LowRank(a, b, 0.25)
            yield g.record(BatchedLinear(g.value(n_heads * 40), x, weight, None, changes))


def batched_linear(g: Recorder, x: Value, param: Param) -> Value:
    """Multiply each head of x by a matrix of its own.

    Formula: `out[h] = x[h] @ weight[h].T + bias[h]` for each head h, the bias where the file has one
    Shapes: x [n, n_head * n_in], weight (n_head, n_out, n_in), bias (n_head, n_out); out [n, n_head * n_out]
    Limits: no scale beside the weight
    Example: `q = g.batched_linear(q_nope, block.attn_k_b)`
    """
    shape = param_of("batched_linear", param).weight.shape
    fits = len(shape) == 3 and x.width == shape[0] * shape[2]
    expect("batched_linear", fits, f"{param.weight.name} {shape} on width {x.width}")
    if param.bias:
        expect("batched_linear", param.bias.shape == shape[:2], f"{param.bias.name} {param.bias.shape} and {shape}")
    expect("batched_linear", param.scale is None, f"{param.weight.name} and a scale")
    return g.record(BatchedLinear(g.value(shape[0] * shape[1]), x, param.weight, param.bias))


def _pad_heads(to: Lowering, x: Slot, out: Slot, n_heads: int) -> None:
    to.step(
        pad_heads_kernel(), PAD_HEADS, x=x, out=out, x_width=x.width // n_heads, out_width=out.width // n_heads,
        n_heads=n_heads,
    )  # fmt: skip


@functools.cache
def pad_heads_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.kernels.api import Kernel, carray, pointer, share

    def pad_heads(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, PAD_HEADS)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.x_stride), a.n_heads * a.x_width, np.float32)
            out = carray(pointer(a.out + row * a.out_stride), a.n_heads * a.out_width, np.float32)
            for head in range(a.n_heads):
                for i in range(a.out_width):
                    number = np.float32(0)
                    if i < a.x_width:
                        number = x[head * a.x_width + i]
                    out[head * a.out_width + i] = number

    return Kernel(pad_heads)

"""Layer normalisation (Ba et al. 2016).

out = (x - mean) / sqrt(variance + eps) * weight + bias
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import RUN
from llamacli.ops.base import MakeParam, Op, Recorder, expect_number
from llamacli.ops.lowering import Lowering
from llamacli.ops.norms import NORM, check_norm, lower_norm, per_head
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel


@attrs.frozen(eq=False)
class LayerNorm(Op):
    """Layer norm op, over each head of `head_dim` numbers.

    out = (x - mean) / sqrt(variance + eps) * weight + bias, where the variance is biased: the mean of (x - mean)^2.
    Weight and bias are (head_dim,) or (n_heads, head_dim); either may be absent.
    """

    x: Value
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    head_dim: int

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.head_dim)
        heads = heads - heads.mean(-1, keepdims=True)
        normed = heads / np.sqrt(np.mean(heads * heads, -1, keepdims=True) + self.eps)
        return per_head(normed, run, self.weight, self.bias).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        lower_norm(to, layer_norm_kernel(), self.x, self.out, self.weight, self.bias, self.eps, self.head_dim)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield layer_norm(g, x, param("whole", x.width, bias=True), 1e-5)
        yield layer_norm(g, x, None, 1e-5, 8)
        yield layer_norm(g, x, param("heads", x.width // 8, 8), 0.5, 8)


def layer_norm(g: Recorder, x: Value, norm: Param | Tensor | None, eps: float, head_dim: int | None = None) -> Value:
    """Record layer norm over the width, or each head of `head_dim`.

    Mean and variance are normalised; the norm None has no weight.

    Formula: `out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias`
    Shapes: x [n, n_heads * head_dim]; weight and bias (head_dim,) or (n_heads, head_dim); out as x; without `head_dim`
        the row is one head
    Limits: the variance is the biased one; eps is under the root
    Example: `x = g.layer_norm(x, block.attn_norm, config.layer_norm_eps)`
    """
    head_dim, weight, bias = check_norm("layer_norm", x, norm, head_dim)
    expect_number("layer_norm", "eps", eps, 0, 1)
    return g.record(LayerNorm(g.value(x.width), x, weight, bias, eps, head_dim))


@functools.cache
def layer_norm_kernel() -> Kernel:
    """Compiled kernel, in two passes; sums are float64."""
    from llamacli.kernels.api import Kernel, carray, pointer, share
    from llamacli.kernels.norms import sum_of, sum_of_squares, write_normed

    def layer_norm(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, NORM)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        for unit in range(first, last):
            head = unit % a.n_heads
            place = (r.first_row + unit // a.n_heads) * a.stride + 4 * head * a.head_dim
            mean = np.float32(sum_of(a.x + place, a.head_dim) / a.head_dim)
            squares = sum_of_squares(a.x + place, a.head_dim, mean)
            scale = np.float32(1) / np.sqrt(np.float32(squares / a.head_dim) + a.eps)
            weight, bias = a.weight + head * a.weight_stride, a.bias + head * a.bias_stride
            write_normed(a.x + place, a.out + place, a.head_dim, a.n_heads == 1, mean, scale, weight, bias)

    return Kernel(layer_norm)

"""Root-mean-square norm (Zhang and Sennrich 2019).

out = x / sqrt(mean(x^2) + eps) * weight + bias
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import RUN
from llamacli.ops.base import MakeParam, Op, Recorder, expect_number
from llamacli.ops.key_shift import Keys, KeyShift
from llamacli.ops.lowering import Lowering
from llamacli.ops.norms import NORM, check_norm, lower_norm, per_head
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel


@attrs.frozen(eq=False)
class RmsNorm(Op):
    """RMS norm op, over each head of `head_dim` numbers.

    out = x / sqrt(mean(x^2) + eps) * weight + bias. Weight and bias are (head_dim,), the same for all heads, or
    (n_heads, head_dim); either may be absent.
    """

    x: Value
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    head_dim: int

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.head_dim)
        normed = heads / np.sqrt(np.mean(heads * heads, -1, keepdims=True) + self.eps)
        return per_head(normed, run, self.weight, self.bias).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        lower_norm(to, rms_norm_kernel(), self.x, self.out, self.weight, self.bias, self.eps, self.head_dim)

    def shift_keys(self, keys: Keys, shift: KeyShift) -> Keys | None:
        # Shifts the values that the weight multiplies: RoPE does not change the mean square, and the weight is
        # divided out before and multiplied in after.
        if self.bias or keys.shape[1] != self.head_dim or shift.is_normed:
            return None
        weight = shift.weight(self.weight)[..., : self.head_dim, None] if self.weight else np.float32(1)
        if not np.all(weight):
            return None
        shifted = shift.of(self.x, keys / weight, True)
        return None if shifted is None else (shifted * weight).astype(np.float32)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield rms_norm(g, x, param("whole", x.width), 1e-6)
        yield rms_norm(g, x, None, 1e-6, 8)
        yield rms_norm(g, x, param("heads", x.width // 8, 8), 0.5, 8)
        yield rms_norm(g, x, param("biased", x.width, bias=True), 1e-5)


def rms_norm(g: Recorder, x: Value, norm: Param | Tensor | None, eps: float, head_dim: int | None = None) -> Value:
    """Record RMS norm over the width, or each head of `head_dim`.

    The norm None has no weight.

    Formula: `out = x / sqrt(mean(x^2) + eps) * weight + bias`
    Shapes: x [n, n_heads * head_dim]; weight and bias (head_dim,) or (n_heads, head_dim); out as x; without `head_dim`
        the row is one head
    Limits: eps is under the root, added to the mean; an L2 norm of heads is
        `g.scale(g.rms_norm(x, None, eps / d, d), d**-0.5)`
    Example: `q = g.rms_norm(q, block.attn_q_norm, config.rms_eps, config.head_dim)`
    """
    head_dim, weight, bias = check_norm("rms_norm", x, norm, head_dim)
    expect_number("rms_norm", "eps", eps, 0, 1)
    return g.record(RmsNorm(g.value(x.width), x, weight, bias, eps, head_dim))


@functools.cache
def rms_norm_kernel() -> Kernel:
    """Compiled kernel; the mean is summed in float64, as in GGML."""
    from llamacli.kernels.api import Kernel, carray, pointer, share
    from llamacli.kernels.norms import sum_of_squares, write_normed

    def rms_norm(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, NORM)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        for unit in range(first, last):
            head = unit % a.n_heads
            place = (r.first_row + unit // a.n_heads) * a.stride + 4 * head * a.head_dim
            total = sum_of_squares(a.x + place, a.head_dim, np.float32(0))
            scale = np.float32(1) / np.sqrt(np.float32(total / a.head_dim) + a.eps)
            weight, bias = a.weight + head * a.weight_stride, a.bias + head * a.bias_stride
            write_normed(a.x + place, a.out + place, a.head_dim, a.n_heads == 1, np.float32(0), scale, weight, bias)

    return Kernel(rms_norm)

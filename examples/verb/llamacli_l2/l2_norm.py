"""L2 normalisation of each head (RWKV-7, Peng et al. 2025).

out = x / max(sqrt(sum(x^2)), eps)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.plugin import LANES, RUN, Array, Lowering, MakeParam, Op, Recorder, Run, Value, expect, f32, record

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

L2_NORM = record("x", "out", "stride", "n_heads", "head_dim", eps=np.float32)


@attrs.frozen(eq=False)
class L2Norm(Op):
    """out = x / max(sqrt(sum(x^2)), eps) over each head of `head_dim` numbers."""

    x: Value
    head_dim: int
    eps: float

    def compute(self, run: Run) -> Array:
        """Compute the reference in NumPy: `run[x]` is float64 [n_tokens, width]."""
        heads = run[self.x].reshape(run.n, -1, self.head_dim)
        norms = np.sqrt(np.sum(heads * heads, -1, keepdims=True))
        return (heads / np.maximum(norms, self.eps)).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        """Append the kernel step: the fields of its record.

        Without this method, `compute` is run.
        """
        x, out = f32(self.x), f32(self.out)
        to.step(
            l2_norm_kernel(), L2_NORM, x=x, out=out, n_heads=x.width // self.head_dim, head_dim=self.head_dim,
            eps=self.eps, work_unit=self.head_dim,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """Record small examples on `x`.

        `llamacli warmup` compiles them, and tests compare them with `compute`.
        """
        yield l2_norm(g, x, x.width, 1e-6)
        yield l2_norm(g, x, 8, 0.5)


def l2_norm(g: Recorder, x: Value, head_dim: int, eps: float) -> Value:
    """Record the op; an architecture's `forward` calls this."""
    expect("l2_norm", head_dim > 0 and x.width % head_dim == 0, f"head_dim {head_dim} and width {x.width}")
    return g.record(L2Norm(g.value(x.width), x, head_dim, eps))


@functools.cache
def l2_norm_kernel() -> Kernel:
    """Compiled kernel; a head is a unit of work.

    Numba is imported here, when a model is loaded.
    """
    from llamacli.plugin import Kernel, carray, pointer, share, simd

    def l2_norm(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, L2_NORM)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        for unit in range(first, last):
            start = (r.first_row + unit // a.n_heads) * a.stride + 4 * (unit % a.n_heads) * a.head_dim
            x = carray(pointer(a.x + start), a.head_dim, np.float32)
            total = np.float64(0)
            for i in range(a.head_dim):
                total += np.float64(x[i]) * np.float64(x[i])
            scale = np.float32(1) / max(np.float32(np.sqrt(total)), a.eps)
            n_vector = a.head_dim // LANES * LANES
            for i in range(0, 4 * n_vector, 4 * LANES):
                simd.store(a.out + start + i, simd.mul(simd.load(a.x + start + i), simd.splat(scale)))
            out = carray(pointer(a.out + start), a.head_dim, np.float32)
            for i in range(n_vector, a.head_dim):
                out[i] = x[i] * scale

    return Kernel(l2_norm)

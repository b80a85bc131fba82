"""Statistical top-k (You et al. 2025, arXiv:2506.06644).

out = max(x - (mean + z * deviation), 0): the share of a row's numbers that a normal distribution has above z stays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.plugin import RUN, Array, Lowering, MakeParam, Op, Recorder, Run, Value, columns, expect, f32, record

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

TOP_K = record("x", "out", "stride", "width", z=np.float32)


@attrs.frozen(eq=False)
class GaussianTopK(Op):
    """out = max(x - (mean + z * deviation), 0).

    The deviation has n - 1 degrees of freedom.
    """

    x: Value
    z: float

    def compute(self, run: Run) -> Array:
        x = run[self.x]
        cutoff = x.mean(1, keepdims=True) + self.z * x.std(1, ddof=1, keepdims=True)
        return np.maximum(x - cutoff, 0)

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        to.step(gaussian_topk_kernel(), TOP_K, x=x, out=out, width=x.width, z=self.z, work_unit=x.width)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield gaussian_topk(g, x, 0.5)
        yield gaussian_topk(g, columns(g, x, 3, 21), -0.2)


def gaussian_topk(g: Recorder, x: Value, z: float) -> Value:
    """Keep what is z standard deviations above its row's mean."""
    expect("gaussian_topk", x.width > 1, f"a row of {x.width} number and its deviation")
    return g.record(GaussianTopK(g.value(x.width), x, float(z)))


@functools.cache
def gaussian_topk_kernel() -> Kernel:
    """Compiled kernel; sums are float64, a row is a unit of work."""
    from llamacli.plugin import Kernel, carray, pointer, share

    def gaussian_topk(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, TOP_K)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.stride), a.width, np.float32)
            out = carray(pointer(a.out + row * a.stride), a.width, np.float32)
            total = 0.0
            for i in range(a.width):
                total += np.float64(x[i])
            mean = np.float32(total / a.width)
            squares = 0.0
            for i in range(a.width):
                deviation = np.float64(x[i] - mean)  # its square may be 0 in float32
                squares += deviation * deviation
            cutoff = mean + a.z * np.float32(np.sqrt(squares / (a.width - 1)))
            for i in range(a.width):
                out[i] = max(x[i] - cutoff, np.float32(0))

    return Kernel(gaussian_topk)

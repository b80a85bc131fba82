"""Dot product of heads, an op of RWKV-7.

out[h] = sum(a[h] * b[h])
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.plugin import RUN, Array, Lowering, MakeParam, Op, Recorder, Run, Value, expect, f32, record

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

DOT = record("a", "b", "out", "stride", "out_stride", "n_heads", "head_dim")


@attrs.frozen(eq=False)
class Dot(Op):
    """Dot product op over each head of `head_dim` numbers."""

    a: Value
    b: Value
    head_dim: int

    def compute(self, run: Run) -> Array:
        return np.asarray((run[self.a] * run[self.b]).reshape(run.n, -1, self.head_dim).sum(-1))

    def lower(self, to: Lowering) -> None:
        a, b, out = f32(self.a), f32(self.b), f32(self.out)
        to.step(
            dot_kernel(), DOT, a=a, b=b, out=out, n_heads=self.out.width, head_dim=self.head_dim,
            work=float(self.a.width),
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield dot(g, x, x, 8)
        yield dot(g, x, x, x.width)


def dot(g: Recorder, a: Value, b: Value, head_dim: int) -> Value:
    """Record the dot product of a and b for each head.

    The result is [n, n_heads]. Raises PluginError if widths differ or are not whole heads.
    """
    fits = a.width == b.width and head_dim > 0 and a.width % head_dim == 0
    expect("dot", fits, f"widths {a.width} and {b.width}, heads of {head_dim}")
    return g.record(Dot(g.value(a.width // head_dim), a, b, head_dim))


@functools.cache
def dot_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.plugin import Kernel, carray, pointer, share

    def head_dot(args: int, run: int, thread: int, n_threads: int) -> None:
        args_, r = carray(pointer(args), 1, DOT)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            n = args_.n_heads * args_.head_dim
            a = carray(pointer(args_.a + row * args_.stride), n, np.float32)
            b = carray(pointer(args_.b + row * args_.stride), n, np.float32)
            out = carray(pointer(args_.out + row * args_.out_stride), args_.n_heads, np.float32)
            for head in range(args_.n_heads):
                total = np.float32(0)
                for i in range(head * args_.head_dim, (head + 1) * args_.head_dim):
                    total += a[i] * b[i]
                out[head] = total

    return Kernel(head_dot)

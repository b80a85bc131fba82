"""Selection of columns of rows, or of each head."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.heads import Heads, lower_heads
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

COLUMNS = record("x", "x_stride", "out", "out_stride", "width")


@attrs.frozen(eq=False)
class Columns(Op):
    """Column selection op: `width` columns, from `first` on, of each head.

    A head is `of` numbers, or the whole row.
    """

    x: Value
    first: int
    width: int
    of: int

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.of)
        return heads[..., self.first : self.first + self.width].reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        if self.of < x.width:
            lower_heads(to, x.width // self.of, self.out, Heads(self.x, self.of, self.first, self.width))
            return
        to.step(columns_kernel(), COLUMNS, x=x.columns(self.first), out=out, width=out.width)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield columns(g, x, 5, x.width - 9)
        yield columns(g, x, 1, 19, of=24)


def columns(g: Recorder, x: Value, first: int, width: int, of: int | None = None) -> Value:
    """Select columns of x, or the same columns of each head.

    Formula: `out = x[:, first : first + width]`; with `of`, `out[h] = x[h][first : first + width]` for each head h
    Shapes: x [n, n_heads * of]; out [n, n_heads * width]; without `of`, the row is one head
    Limits: a range within the head, of at least one column
    Example: `q, gate = g.columns(qg, 0, 128, of=256), g.columns(qg, 128, 128, of=256)`
    """
    of = x.width if of is None else of
    expect("columns", of > 0 and x.width % of == 0, f"heads of {of} numbers and width {x.width}")
    expect("columns", 0 <= first < first + width <= of, f"{first} + {width} and width {of}")
    return g.record(Columns(g.value(x.width // of * width), x, first, width, of))


@functools.cache
def columns_kernel() -> Kernel:
    """Compiled kernel that selects columns of whole rows.

    x is the address of the first column; a row is a unit of work.
    """
    from llamacli.kernels.api import Kernel, carray, pointer, share

    def columns(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, COLUMNS)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.x_stride), a.width, np.float32)
            out = carray(pointer(a.out + row * a.out_stride), a.width, np.float32)
            for i in range(a.width):
                out[i] = x[i]

    return Kernel(columns)

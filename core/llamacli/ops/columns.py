"""Selection of columns: out = x[:, first : first + width]."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lowering import Lowering, f32, stride
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

COLUMNS = record("x", "x_stride", "out", "out_stride", "width")


@attrs.frozen(eq=False)
class Columns(Op):
    """Column selection op: columns of x from `first` on."""

    x: Value
    first: int

    def compute(self, run: Run) -> Array:
        """See Op."""
        return run[self.x][:, self.first : self.first + self.out.width]

    def lower(self, to: Lowering) -> None:
        """See Op."""
        x, out = f32(self.x), f32(self.out)
        to.step(
            columns_kernel(),
            COLUMNS,
            [x],
            [out],
            lambda at: {
                "x": at(x)[:, self.first :], "x_stride": stride(at(x)), "out": at(out), "out_stride": stride(at(out)),
                "width": out.width,
            },
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        yield columns(g, x, 5, x.width - 9)


def columns(g: Recorder, x: Value, first: int, width: int) -> Value:
    """Select columns `first` to `first + width - 1` of x."""
    expect("columns", 0 <= first < first + width <= x.width, f"{first} + {width} and width {x.width}")
    return g.record(Columns(g.value(width), x, first))


@functools.cache
def columns_kernel() -> Kernel:
    """Compiled kernel of column selection.

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

"""Deepstack: parts of wide rows of embeddings that later layers add."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import ROW, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

DEEPSTACK = record("x", "x_stride", "out", "out_stride", "width", "part")


@attrs.frozen(eq=False)
class Deepstack(Op):
    """out = x + part `part` of given rows of embeddings."""

    x: Value
    part: int

    def compute(self, run: Run) -> Array:
        out, inputs = run[self.x], run.span.inputs
        if inputs is not None and inputs.embeddings is not None:
            width = self.out.width
            out[inputs.rows] += inputs.embeddings[:, self.part * width : (self.part + 1) * width]
        return out

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        to.step(deepstack_kernel(), DEEPSTACK, x=x, out=out, width=out.width, part=self.part)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield deepstack(g, x, 1)


def deepstack(g: Recorder, x: Value, part: int) -> Value:
    """Add a part of rows of embeddings (DeepStack, Meng et al. 2024).

    Where a model has this verb, the rows of embeddings that inputs give are several times as wide as x: the first part
    is the result of `embed`, and each layer adds one of the others, such as features of a picture. Tokens that are ids
    keep their x.

    Formula: `out = x + rows[:, part * width : (part + 1) * width]`, out = x for ids
    Shapes: x [n, width], rows [n, width * n_parts]; out [n, width]
    Limits: part is 1 or more; the graph embeds tokens, in rows as wide as x
    Example: `x = g.deepstack(x, layer + 1)`
    """
    expect("deepstack", part > 0, f"part {part} and rows whose part 0 is that of embed")
    return g.record(Deepstack(g.value(x.width), x, part))


@functools.cache
def deepstack_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.kernels.api import Kernel, carray, pointer, share

    def deepstack(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, DEEPSTACK)[0], carray(pointer(run), 1, RUN)[0]
        rows = carray(pointer(r.rows), r.n_rows, ROW)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.x_stride), a.width, np.float32)
            out = carray(pointer(a.out + row * a.out_stride), a.width, np.float32)
            given = rows[row].given
            added = carray(pointer((given + 4 * a.part * a.width) if given else a.x), a.width, np.float32)
            for i in range(a.width):
                out[i] = x[i] + (added[i] if given else np.float32(0))

    return Kernel(deepstack)

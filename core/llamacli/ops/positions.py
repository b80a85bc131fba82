"""Learned position embeddings: out = table[position]."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from llamacli.kernels.layout import ROW, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

POSITIONS = record("table", "table_stride", "out", "out_stride", "width")


@attrs.frozen(eq=False)
class Positions(Op):
    """out = table[position], the table (n_positions, n_embd)."""

    uses_position = True

    table: Tensor

    def max_positions(self) -> int:
        return self.table.shape[0]

    def compute(self, run: Run) -> Array:
        return run[self.table][run.positions]

    def lower(self, to: Lowering) -> None:
        table, out = to.vector(self.table), f32(self.out)
        to.step(positions_kernel(), POSITIONS, table=table, out=out, width=table.shape[1])

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield x + positions(g, param("positions", 64, x.width))


def positions(g: Recorder, table: Param) -> Value:
    """Look up the embedding of each token's position.

    It is to be added to that of the token.

    Formula: `out = table[position]`
    Shapes: table (n_positions, n_embd); out [n, n_embd]
    Limits: contexts are no longer than the table has rows
    Example: `x = g.embed(weights.token_embd) + g.positions(weights.position_embd)`
    """
    weight = param_of("positions", table).weight
    expect("positions", len(weight.shape) == 2, f"{weight.name} {weight.shape} and rows a position")
    return g.record(Positions(g.value(weight.shape[1]), weight))


@functools.cache
def positions_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.kernels.api import LANES, Kernel, carray, pointer, share, simd

    def positions(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, POSITIONS)[0], carray(pointer(run), 1, RUN)[0]
        rows = carray(pointer(r.rows), r.n_rows, ROW)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            source = a.table + rows[row].position * a.table_stride
            for at in range(0, 4 * a.width, 4 * LANES):
                simd.store(a.out + row * a.out_stride + at, simd.load(source + at))

    return Kernel(positions)

"""Learned position embeddings of a picture's columns and rows."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from llamacli.inputs import N_COMPONENTS
from llamacli.ops.base import Op, Recorder, expect, param_of
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run, Span
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class AxisPositions(Op):
    """out = the table's row of the column, and that of the row."""

    uses_position = True

    table: Tensor

    @property
    def n_components(self) -> int:
        return N_COMPONENTS

    def compute(self, run: Run) -> Array:
        return _looked_up(run[self.table], run.span)

    def lower(self, to: Lowering) -> None:
        table, out = to.vector(self.table)[:, : self.out.width], f32(self.out)

        def look_up(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
            for first, span in rows.parts():
                at(out)[first : first + span.n, : out.width] = _looked_up(table, span)

        to.host_step(look_up, [], [out])


def _looked_up(table: Buffer, span: Span) -> Buffer:
    assert span.inputs is not None
    assert span.inputs.positions is not None
    _, rows, columns, _ = span.inputs.positions.T
    sums: Buffer = table[columns] + table[len(table) // 2 + rows]
    return sums


def axis_positions(g: Recorder, table: Param) -> Value:
    """Look up position embeddings of each patch's column and row.

    The first half of the table has those of columns, the second those of rows.

    Formula: `out[i] = table[column i] + table[len(table) / 2 + row i]`
    Shapes: table (2 * side, n_embd); out [n, n_embd]
    Limits: media encoders only; no more columns and rows than `side`
    Example: `x = x + g.axis_positions(weights.v_position_embd)`
    """
    weight = param_of("axis_positions", table).weight
    fits = len(weight.shape) == 2 and weight.shape[0] % 2 == 0
    expect("axis_positions", fits, f"{weight.name} {weight.shape} and the rows of two axes")
    return g.record(AxisPositions(g.value(weight.shape[1]), weight))

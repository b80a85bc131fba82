"""Learned position embeddings of a square grid, resized to a picture's."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.inputs import N_COMPONENTS
from llamacli.ops.base import Op, Recorder, expect, param_of
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run, Span
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class GridPositions(Op):
    """out = the table's grid, resized, at each patch's row and column."""

    uses_position = True

    table: Tensor
    align_corners: bool

    @property
    def n_components(self) -> int:
        return N_COMPONENTS

    def compute(self, run: Run) -> Array:
        return self._resized(run[self.table], run.span)

    def lower(self, to: Lowering) -> None:
        table, out = to.vector(self.table)[:, : self.out.width], f32(self.out)

        def resize(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
            for first, span in rows.parts():
                at(out)[first : first + span.n, : out.width] = self._resized(table, span)

        to.host_step(resize, [], [out])

    def _resized(self, table: Buffer, span: Span) -> Array:
        assert span.inputs is not None
        assert span.inputs.positions is not None
        _, rows, columns, _ = span.inputs.positions.T
        side = math.isqrt(len(table))
        down, across = (_weights(side, int(at.max()) + 1, self.align_corners) for at in (rows, columns))
        grid = table.reshape(side, side, -1).astype(np.float64)
        whole = np.tensordot(across, np.tensordot(down, grid, (1, 0)), (1, 1))
        return np.ascontiguousarray(whole[columns, rows])


def _weights(side: int, n: int, align_corners: bool) -> npt.NDArray[np.float64]:
    """Interpolation weights of an axis, [n, side]."""
    if n == side:
        return np.eye(side)
    out = np.arange(n, dtype=np.float32)
    if align_corners:
        ratio = np.float32(n - 1) / np.float32(side - 1) if n > 1 and side > 1 else np.float32(n) / np.float32(side)
        place, reach = out / ratio, np.float32(1)
    else:
        ratio = np.float32(n) / np.float32(side)
        place, reach = (out + np.float32(0.5)) / ratio - np.float32(0.5), max(np.float32(1), 1 / ratio)
    near = np.maximum(0, 1 - np.abs(np.arange(side, dtype=np.float32) - place[:, None]) / reach)
    return (near / near.sum(1, keepdims=True)).astype(np.float64)


def grid_positions(g: Recorder, table: Param, *, align_corners: bool = False) -> Value:
    """Look up position embeddings in a grid, resized to the picture's.

    The table has the rows of a square grid. For pictures of other sizes it is interpolated bilinearly, where it shrinks
    with antialiasing, as PyTorch's `interpolate` does; with `align_corners`, without it, and corners stay corners.

    Formula: `out[i] = resized(table)[row i, column i]`
    Shapes: table (side * side, n_embd); out [n, n_embd]
    Limits: media encoders only
    Example: `x = x + g.grid_positions(weights.v_position_embd, align_corners=True)`
    """
    weight = param_of("grid_positions", table).weight
    fits = len(weight.shape) == 2 and math.isqrt(weight.shape[0]) ** 2 == weight.shape[0]
    expect("grid_positions", fits, f"{weight.name} {weight.shape} and the rows of a square grid")
    return g.record(GridPositions(g.value(weight.shape[1]), weight, align_corners))

"""Merging of neighbouring rows: pixel shuffle and average pooling of media encoders."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value


@attrs.frozen(eq=False)
class MergeRows(Op):
    """Merge op: each `size` rows side by side, or their mean.

    `interleaved`, their numbers are in turns.

    The row that has a group's result is its last one; the other rows of `out` are not computed further.
    """

    mixes_tokens = True

    x: Value
    size: int
    mean: bool
    interleaved: bool

    @property
    def n_merged(self) -> int:
        return self.size

    def compute(self, run: Run) -> Array:
        out = np.zeros((run.n, self.out.width))
        out[self.size - 1 :: self.size] = self._merged(run[self.x])
        return out

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)

        def merge(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
            merged = self._merged(at(x)[rows.first : rows.stop, : x.width])
            at(out)[rows.first + self.size - 1 : rows.stop : self.size, : out.width] = merged

        to.host_step(merge, [x], [out])

    def _merged(self, x: Buffer) -> Buffer:
        groups = x.reshape(-1, self.size, self.x.width)
        if self.mean:
            return groups.mean(1, dtype=np.float64)
        return (groups.swapaxes(1, 2) if self.interleaved else groups).reshape(-1, self.out.width)


def merge_rows(g: Recorder, x: Value, size: int, *, mean: bool = False, interleaved: bool = False) -> Value:
    """Merge each `size` rows of x to one.

    A media encoder gets its patches in groups of k * k neighbours, from left to right and from top to bottom: with a
    size of k * k, the rows of a group side by side are a pixel shuffle (Shi et al. 2016), and their `mean` is average
    pooling. `interleaved`, the numbers of a column of the group are neighbours, as in PyTorch's `unfold`. What follows
    is computed for the merged rows alone, so that it cannot mix rows or read positions.

    Formula: `out = x.reshape(n / size, size * width)`; with `mean`, `out = x.reshape(n / size, size, width).mean(1)`;
        `interleaved`, `out = x.reshape(n / size, size, width).swapaxes(1, 2).reshape(n / size, size * width)`
    Shapes: x [n, width]; out [n / size, size * width], with `mean` [n / size, width]
    Limits: media encoders only; n is a multiple of size; all merges of a forward pass have one size
    Example: `x = g.linear(g.merge_rows(x, config.n_merge**2), weights.mm_model_fc)`
    """
    expect("merge_rows", size > 0, f"groups of {size} rows")
    expect("merge_rows", not (mean and interleaved), "mean and interleaved")
    sizes = {op.size for op in g.ops if isinstance(op, MergeRows)} | {size}
    expect("merge_rows", len(sizes) == 1, f"groups of {' and of '.join(map(str, sorted(sizes)))} rows")
    return g.record(MergeRows(g.value(x.width if mean else size * x.width), x, size, mean, interleaved))

"""Values that cross from one pipeline stage to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.base import Op
from llamacli.ops.lowering import Array, HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Sent(Op):
    """out = values side by side: rows for the next stage."""

    values: tuple[Value, ...]

    def compute(self, run: Run) -> npt.NDArray[np.floating[Any]]:
        return np.concatenate([np.empty((run.n, 0)), *(run[value] for value in self.values)], 1)

    def lower(self, to: Lowering) -> None:
        out, values = f32(self.out), [f32(value) for value in self.values]

        def copy(rows: HostRows, at: Callable[[Slot], Array]) -> None:
            some, first, target = slice(rows.first, rows.stop), 0, at(out)
            for value in values:
                target[some, first : first + value.width] = at(value)[some, : value.width]
                first += value.width

        to.host_step(copy, values, [out])


@attrs.frozen(eq=False)
class Received(Op):
    """out = columns from `first` on of received rows."""

    first: int

    def compute(self, run: Run) -> npt.NDArray[np.floating[Any]]:
        assert run.hidden is not None
        return run.hidden[:, self.first : self.first + self.out.width]

    def lower(self, to: Lowering) -> None:
        out, columns = f32(self.out), slice(self.first, self.first + self.out.width)

        def copy(rows: HostRows, at: Callable[[Slot], Array]) -> None:
            for first, span in rows.parts():
                assert span.hidden is not None
                at(out)[first : first + span.n, : out.width] = span.hidden[:, columns]

        to.host_step(copy, [], [out])

"""Base class of ops with a recurrent state.

Such as convolutions over tokens and linear attention.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.layout import RECURRENT_ENTRY, SOURCE
from llamacli.ops.base import Op
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Array

Floats = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class StateOp(Op):
    """Op that carries a recurrent state from token to token.

    It is number `state`, which `g.recurrent_state(name, *shape)` returned: for each sequence float32 in this shape,
    zeros before the first token. A subclass defines `advance` in NumPy, and in `lower` appends a kernel that
    `state_kernel` makes, whose parameters include `state_params`.
    """

    mixes_tokens = True

    state: int

    @abc.abstractmethod
    def advance(self, run: Run, first: int, last: int, state: Floats) -> tuple[Array, Floats]:
        """Compute rows `first` to `last` - 1 of a run, in NumPy.

        `state` is that before row `first`. Returns the results, [last - first, out.width], and the state after the last
        row; with no rows, the state itself.
        """

    def compute(self, run: Run) -> Array:
        n_before = run.n - run.sequence.n_behind
        out, kept = self.advance(run, 0, n_before, run.sequence.read_state(self.state, SOURCE))
        state = kept
        if n_before < run.n:
            behind, state = self.advance(run, n_before, run.n, kept)
            out = np.concatenate([out, behind])
        run.sequence.write_state(self.state, state, kept)
        return out

    def state_params(self, to: Lowering) -> dict[str, Any]:
        """Parameters of its kernel that find the state: STATE_FIELDS of `llamacli.kernels.layout`."""
        n_numbers = math.prod(to.recurrent[self.state].shape)
        zeros = to.shared(("zero state", n_numbers), lambda: to.memory(np.zeros(n_numbers, np.float32)))
        return {"entry": RECURRENT_ENTRY * (len(to.states) + self.state), "zeros": zeros, "n_numbers": n_numbers}

"""Hidden states of the tokens before: input of multi-token-prediction heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import HostRows, Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class PreviousHidden(Op):
    """out = hidden state of the token before, given by the program's caller."""

    def compute(self, run: Run) -> npt.NDArray[np.floating[Any]]:
        return np.zeros((run.n, self.out.width)) if run.hidden is None else run.hidden

    def lower(self, to: Lowering) -> None:
        out = f32(self.out)

        def write(rows: HostRows, at: Callable[[Any], npt.NDArray[Any]]) -> None:
            buffer = at(out)
            for first, span in rows.parts():
                buffer[first : first + span.n, : out.width] = 0.0 if span.hidden is None else span.hidden

        to.host_step(write, [], [out])


def previous_hidden(g: Recorder, width: int) -> Value:
    """Hidden state of the model at the token before each token.

    As the model's output layer reads it. For multi-token-prediction heads, `Architecture.nextn`; a forward pass has no
    such input. It is zero where the hidden state is not known, as before the first token.

    Formula: `out[p] = hidden[p - 1]`
    Shapes: out [n, width]
    Limits: `width` is `config.n_embd`
    Example: `h = g.rms_norm(g.previous_hidden(c.n_embd), block.nextn_hnorm, c.rms_eps)`
    """
    expect("previous_hidden", width > 0, f"a hidden state of {width} numbers")
    return g.record(PreviousHidden(g.value(width)))

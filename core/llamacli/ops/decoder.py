"""Boundary of a graph with an encoder: what follows is the decoder's."""

from __future__ import annotations

import attrs
import numpy as np

from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Array


@attrs.frozen(eq=False)
class Decoder(Op):
    """End of the encoder's ops.

    `out` has no numbers and is not read.
    """

    mixes_tokens = True

    def compute(self, run: Run) -> Array:
        return np.empty((run.n, 0))

    def lower(self, to: Lowering) -> None:
        """See Op; there is nothing to do."""


def decoder(g: Recorder) -> None:
    """Begin the decoder of an encoder-decoder model.

    All ops so far are the encoder's: they run once, on the text with which a context begins, and what they `store` is
    what the decoder has of it. All further ops run on the tokens behind that text, and read no value of the encoder.

    Formula: `cross = store(linear(encoder(text), k), linear(encoder(text), v))` comes before it
    Shapes: no operands
    Limits: once in a forward pass, after a `store`
    Example: `g.decoder()`
    """
    expect("decoder", bool(g.states), "a decoder and an encoder that stores nothing")
    expect("decoder", not any(isinstance(op, Decoder) for op in g.ops), "one decoder and another")
    g.record(Decoder(g.value(0)))

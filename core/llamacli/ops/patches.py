"""Input of a media encoder: rows of patches."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run, Span
from llamacli.ops.values import Array, Value


@attrs.frozen(eq=False)
class Patches(Op):
    """out = the embeddings of the inputs, [n, width]."""

    def compute(self, run: Run) -> Array:
        return _given(run.span, self.out.width).astype(np.float64)

    def lower(self, to: Lowering) -> None:
        out = f32(self.out)

        def copy(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
            for first, span in rows.parts():
                at(out)[first : first + span.n, : out.width] = _given(span, out.width)

        to.host_step(copy, [], [out])


def _given(span: Span, width: int) -> Buffer:
    given = None if span.inputs is None else span.inputs.embeddings
    assert given is not None
    assert given.shape == (span.n, width)
    return given


def patches(g: Recorder, width: int) -> Value:
    """Read the patches of a picture, the input of a media encoder.

    A patch is a square of pixels, unfolded to one row: the embedding of patches, a convolution in other frameworks,
    is `linear` of it (Dosovitskiy et al. 2020).

    Formula: `out[i] = patch i of the picture`
    Shapes: out [n, width]
    Limits: encoders of the group `llamacli.media` only; once in a forward pass
    Example: `x = g.linear(g.patches(3 * config.patch_size**2), weights.v_patch_embd)`
    """
    expect("patches", width > 0, f"width {width}")
    expect("patches", not g.ops, "patches and ops before them")
    return g.record(Patches(g.value(width)))

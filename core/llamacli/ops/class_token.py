"""Class token of vision transformers, in the rows behind the patches."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from llamacli.inputs import N_COMPONENTS
from llamacli.ops.base import Op, Recorder, expect, param_of
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run, Span
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class ClassToken(Op):
    """out = x, or the embedding where the fourth position is 1."""

    uses_position = True

    x: Value
    embedding: Tensor

    @property
    def n_components(self) -> int:
        return N_COMPONENTS

    def compute(self, run: Run) -> Array:
        return np.where(_is_behind(run.span)[:, None], run[self.embedding].reshape(-1), run[self.x])

    def lower(self, to: Lowering) -> None:
        embedding, x, out = to.vector(self.embedding).reshape(-1)[: self.out.width], f32(self.x), f32(self.out)

        def place(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
            for first, span in rows.parts():
                given = at(x)[first : first + span.n, : out.width]
                at(out)[first : first + span.n, : out.width] = np.where(_is_behind(span)[:, None], embedding, given)

        to.host_step(place, [x], [out])


def _is_behind(span: Span) -> Buffer:
    assert span.inputs is not None
    assert span.inputs.positions is not None
    return span.inputs.positions[:, 3] == 1


def class_token(g: Recorder, x: Value, embedding: Param) -> Value:
    """Put an embedding in the rows behind a picture's patches.

    An encoder whose `class_token` is not "" has them: a token that is no patch, and attends to all (Dosovitskiy et al.
    2020).

    Formula: `out[i] = x[i] if i is a patch else embedding`
    Shapes: x [n, width], embedding (width,); out [n, width]
    Limits: media encoders only
    Example: `x = g.class_token(g.linear(patches, weights.v_patch_embd), weights.v_class_embd)`
    """
    weight = param_of("class_token", embedding).weight
    fits = weight.shape in ((x.width,), (1, x.width))
    expect("class_token", fits, f"{weight.name} {weight.shape} and rows of {x.width}")
    return g.record(ClassToken(g.value(x.width), x, weight))

"""Division by element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.activations import exp
from llamacli.ops.base import MakeParam, Recorder, expect, param_of
from llamacli.ops.columns import columns
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.map import map_
from llamacli.ops.values import Param, Tensor, Value


@attrs.frozen(eq=False)
class Div(Lanewise):
    """Division op: out = a / b.

    b is as wide as a, one number a token, or a vector of the model.
    """

    verb = "div"
    a: Value
    b: Value | Tensor

    def formula(self, v: Vocabulary, a: Any, b: Any) -> Any:
        return a / b

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        positive = map_(g, x, exp)
        yield div(g, x, positive)
        yield div(g, x, columns(g, positive, 3, 1))
        yield div(g, x, param("vector", x.width))


def div(g: Recorder, a: Value, b: Value | Param) -> Value:
    """Divide a value by another, or by a vector of the model.

    To divide by a number, multiply: `g.scale(x, 1 / number)`.

    Formula: `out = a / b`
    Shapes: a [n, width]; b [n, width], [n, 1] or a parameter (width,); out [n, width]
    Limits: b is not 0, where the result is infinite or NaN
    Example: `h = g.div(g.map(h, gelu), block.ffn_act)`
    """
    other = b if isinstance(b, Value) else param_of("div", b).weight
    shape = other.shape if isinstance(other, Tensor) else (other.width,)
    fits = shape == (a.width,) or (isinstance(other, Value) and shape == (1,))
    expect("div", fits, f"width {a.width} and shape {shape}")
    return g.record(Div(g.value(a.width), a, other))

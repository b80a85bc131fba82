"""Addition: out = a + b."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import MakeParam, Recorder, expect, param_of
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Param, Tensor, Value


@attrs.frozen(eq=False)
class Add(Lanewise):
    """Addition op: out = a + b.

    b may be a vector of the model, the same for all tokens.
    """

    verb = "add"
    a: Value
    b: Value | Tensor

    def formula(self, v: Vocabulary, a: Any, b: Any) -> Any:
        return a + b

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield add(g, x, x)
        yield add(g, x, param("vector", x.width))
        yield add(g, x, param("rows", 2, x.width).split(1, 1)[1])


def add(g: Recorder, a: Value, b: Value | Param) -> Value:
    """Add two values of one width, or a value and a vector.

    Values can also be added with the operator +.

    Formula: `out = a + b`
    Shapes: a [n, width]; b [n, width] or a parameter (width,) or (1, width); out [n, width]
    Limits: equal widths
    Example: `x = x + g.linear(attended, block.attn_output)`
    """
    other = b if isinstance(b, Value) else param_of("add", b).weight
    shape = other.shape if isinstance(other, Tensor) else (other.width,)
    expect("add", shape in ((a.width,), (1, a.width)), f"width {a.width} and shape {shape}")
    return g.record(Add(g.value(a.width), a, other))

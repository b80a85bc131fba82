"""Clamp: out = min(max(x, low), high)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Clamp(Lanewise):
    """out = min(max(x, low), high)."""

    verb = "clamp"
    x: Value
    low: float
    high: float

    def formula(self, v: Vocabulary, x: Any, low: Any, high: Any) -> Any:
        return v.minimum(v.maximum(x, low), high)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield clamp(g, x, -0.1, 0.2)


def clamp(g: Recorder, x: Value, low: float, high: float) -> Value:
    """Bound each element of x from below and above.

    Formula: `out = min(max(x, low), high)`
    Shapes: x [n, width]; out [n, width]
    Limits: low <= high; either may be infinite
    Example: `q = g.clamp(q, -8.0, 8.0)`
    """
    expect("clamp", low <= high, f"bounds {low} and {high}")
    return g.record(Clamp(g.value(x.width), x, float(low), float(high)))

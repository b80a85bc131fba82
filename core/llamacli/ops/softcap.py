"""Soft bound of values: out = cap * tanh(x / cap) (Bello et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import LARGEST, SMALLEST, MakeParam, Recorder, expect_number
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Softcap(Lanewise):
    """out = cap * tanh(x / cap)."""

    verb = "softcap"
    x: Value
    cap: float

    def formula(self, v: Vocabulary, x: Any, cap: Any) -> Any:
        # tanh(x) = 1 - 2 / (e^2x + 1), rounded in the same order as in attention.
        return cap * (1.0 - 2.0 / (v.exp(x * (2.0 / cap)) + 1.0))

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield softcap(g, x, 0.5)


def softcap(g: Recorder, x: Value, cap: float) -> Value:
    """Bound x softly by tanh.

    Formula: `out = cap * tanh(x / cap)`
    Shapes: x [n, width]; out [n, width]
    Limits: cap > 0
    Example: `logits = g.softcap(logits, 30.0)`
    """
    expect_number("softcap", "cap", cap, SMALLEST, LARGEST)
    return g.record(Softcap(g.value(x.width), x, cap))

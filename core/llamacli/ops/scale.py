"""Multiplication by one number: out = x * factor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import LARGEST, MakeParam, Recorder, expect, expect_number
from llamacli.ops.key_shift import Keys, KeyShift
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Param, Tensor, Value


@attrs.frozen(eq=False)
class Scale(Lanewise):
    """out = x * factor, a number or a tensor of one number."""

    verb = "scale"
    x: Value
    factor: float | Tensor

    def formula(self, v: Vocabulary, x: Any, factor: Any) -> Any:
        return x * factor

    def shift_keys(self, keys: Keys, shift: KeyShift) -> Keys | None:
        # Shifts the input: RoPE is linear, so scaling before and after it is the same.
        return shift.of(self.x, keys, shift.is_normed)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield scale(g, x, 2.5)
        yield scale(g, x, param("factor", 1))


def scale(g: Recorder, x: Value, factor: float | Param) -> Value:
    """Multiply by a number, or by a parameter that holds one number.

    Formula: `out = factor * x`
    Shapes: x [n, width], factor a number or a parameter of one number; out [n, width]
    Limits: a parameter of exactly one number
    Example: `x = g.scale(g.embed(weights.token_embd), math.sqrt(config.n_embd))`
    """
    if isinstance(factor, Param):
        weight = factor.weight
        expect("scale", math.prod(weight.shape) == 1, f"{weight.name} of shape {weight.shape} and a single factor")
        return g.record(Scale(g.value(x.width), x, weight))
    expect_number("scale", "factor", factor, -LARGEST, LARGEST)
    return g.record(Scale(g.value(x.width), x, factor))

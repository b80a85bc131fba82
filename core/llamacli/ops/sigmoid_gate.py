"""Gate of one number a token: out = x * sigmoid(gate)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.columns import columns
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class SigmoidGate(Lanewise):
    """out = x * sigmoid(gate), gate one number a token."""

    verb = "sigmoid_gate"
    x: Value
    gate: Value

    def formula(self, v: Vocabulary, x: Any, gate: Any) -> Any:
        return x * v.sigmoid(gate)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield sigmoid_gate(g, x, columns(g, x, 3, 1))


def sigmoid_gate(g: Recorder, x: Value, gate: Value) -> Value:
    """Multiply by sigmoid(gate), where gate is one number a token.

    Formula: `out = x * sigmoid(gate)`
    Shapes: x [n, width], gate [n, 1]; out [n, width]
    Limits: one gate a token; others are `g.mul(x, g.map(gate, sigmoid))`
    Example: `shared = g.sigmoid_gate(shared, g.linear(x, block.ffn_gate_inp_shexp))`
    """
    expect("sigmoid_gate", gate.width == 1, f"a gate of width {gate.width} and one number a token")
    return g.record(SigmoidGate(g.value(x.width), x, gate))

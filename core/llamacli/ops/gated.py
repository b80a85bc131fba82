"""Gated linear unit: out = activation(gate, up) (Dauphin et al. 2017, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.activations import Activation, Formula, checked_activation, formula_of
from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Gated(Lanewise):
    """out = activation(gate, up)."""

    verb = "gated"
    gate: Value
    up: Value
    activation: Activation | Formula

    def formula(self, v: Vocabulary, gate: Any, up: Any) -> Any:
        return formula_of(self.activation)(v, gate, up)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for activation in Activation:
            yield gated(g, x, x, activation)


def gated(g: Recorder, gate: Value, up: Value, activation: Activation | Formula = Activation.SWIGLU) -> Value:
    """Record activation(gate, up).

    The activation is a name or a function of (v, gate, up).

    Formula: `out = f(gate, up)`; f is one of `Activation`, such as `swiglu_oai`: with g = min(gate, 7) and u = up
        bounded to ±7, `g * sigmoid(1.702 * g) * (u + 1)`; or `activations.swiglu_clamped(limit)`
    Shapes: gate and up [n, n_ff]; out [n, n_ff]
    Limits: equal widths
    Example: `hidden = g.gated(gate, up, Activation.REGLU)`
    """
    expect("gated", gate.width == up.width, f"widths {gate.width} and {up.width}")
    return g.record(Gated(g.value(gate.width), gate, up, checked_activation("gated", activation)))


def swiglu(g: Recorder, gate: Value, up: Value) -> Value:
    """Record silu(gate) * up (Shazeer 2020).

    Formula: `out = silu(gate) * up`, `silu(x) = x / (1 + e^-x)`
    Shapes: gate and up [n, n_ff]; out [n, n_ff]
    Limits: equal widths
    Example: `x = g.linear(g.swiglu(g.linear(x, block.ffn_gate), g.linear(x, block.ffn_up)), block.ffn_down)`
    """
    return gated(g, gate, up, Activation.SWIGLU)


def geglu(g: Recorder, gate: Value, up: Value) -> Value:
    """Record gelu(gate) * up (Shazeer 2020).

    Formula: `out = gelu(gate) * up`, `gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`
    Shapes: gate and up [n, n_ff]; out [n, n_ff]
    Limits: equal widths
    Example: `x = g.linear(g.geglu(g.linear(x, block.ffn_gate), g.linear(x, block.ffn_up)), block.ffn_down)`
    """
    return gated(g, gate, up, Activation.GEGLU)

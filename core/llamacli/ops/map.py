"""Elementwise function: out = f(x).

Such as the activation of an MLP without gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.errors import PluginError
from llamacli.ops import activations
from llamacli.ops.activations import Formula
from llamacli.ops.base import MakeParam, Recorder
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Map(Lanewise):
    """out = function(x), element by element."""

    verb = "map"
    x: Value
    function: Formula

    def formula(self, v: Vocabulary, x: Any) -> Any:
        return self.function(v, x)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for name in ["identity", "silu", "gelu", "relu", "relu_squared", "sigmoid", "tanh", "softplus", "exp", "never"]:
            yield map_(g, x, getattr(activations, name))


def map_(g: Recorder, x: Value, function: Formula) -> Value:
    """Apply a function to each element.

    One of `llamacli.plugin`, or one written like them.

    Formula: `out = f(x)`; f is `identity`, `silu`, `gelu`, `gelu_erf`, `relu`, `relu_squared`, `sigmoid`, `tanh`,
        `softplus`, `exp`, `never` or a function of `(v, x)`
    Shapes: x [n, width]; out [n, width]
    Limits: `gelu` is the form by tanh; exp is bounded at -87 and 88; softplus is x above 20
    Example: `up = g.map(g.linear(x, block.ffn_up), relu_squared)`
    """
    if not callable(function):
        raise PluginError(f"map: function must be an activation, such as llamacli.plugin.gelu, not {function!r}")
    return g.record(Map(g.value(x.width), x, function))

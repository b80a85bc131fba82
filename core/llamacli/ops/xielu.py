"""xIELU, an activation with trained parameters (Huang and Schlag 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs

from llamacli.ops.base import MakeParam, Recorder
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.values import Value


@attrs.frozen(eq=False)
class Xielu(Lanewise):
    """Quadratic above 0, exponential below.

    out = p x^2 + beta x where x > 0, else (e^min(x, eps) - 1 - x) n + beta x.
    """

    verb = "xielu"
    x: Value
    n: float
    p: float
    beta: float
    eps: float

    def formula(self, v: Vocabulary, x: Any, n: Any, p: Any, beta: Any, eps: Any) -> Any:
        below = (v.exp(v.minimum(x, eps)) - 1.0 - x) * n
        return v.where(x > 0.0, p * x * x, below) + beta * x

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield xielu(g, x, 0.8, 0.6, 0.5, -1e-6)


def xielu(g: Recorder, x: Value, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Value:
    """Apply xIELU, whose parameters are trained in each layer.

    Formula: `out = p * x^2 + beta * x` where x > 0, else `(e^min(x, eps) - 1 - x) * n + beta * x`, with
        `p = softplus(alpha_p)` and `n = beta + softplus(alpha_n)`
    Shapes: x [n, width]; out [n, width]
    Limits: eps is a small number below 0, as trained; e^x - 1 has an absolute error of 6e-8
    Example: `up = g.xielu(up, alpha_n=0.8, alpha_p=0.8, beta=0.5, eps=-1e-6)`
    """
    n, p = beta + _softplus(alpha_n), _softplus(alpha_p)
    return g.record(Xielu(g.value(x.width), x, n, p, float(beta), float(eps)))


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))

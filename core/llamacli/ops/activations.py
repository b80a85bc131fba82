"""Activation functions, as formulas of elementwise ops.

One-argument functions are for `map`, two-argument ones (gate, up) for `gated` and `moe`.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any

from llamacli.errors import PluginError
from llamacli.ops.lanewise import Vocabulary

Formula = Callable[..., Any]

_GELU = 2 * math.sqrt(2 / math.pi)
_ERF = (
    (
        -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
        -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
    ),
    (
        -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
        -1.42647390514189e-02,
    ),
)  # fmt: skip


def identity(v: Vocabulary, x: Any) -> Any:
    """x itself, for networks without an activation."""
    return x


def silu(v: Vocabulary, x: Any) -> Any:
    """x * sigmoid(x) (Elfwing et al. 2017)."""
    return x / (1.0 + v.exp(-x))


def gelu(v: Vocabulary, x: Any) -> Any:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    # (1 + tanh(z)) / 2 = sigmoid(2z)
    return x * v.sigmoid(_GELU * x * v.fma(x * x, 0.044715, 1.0))


def gelu_erf(v: Vocabulary, x: Any) -> Any:
    """x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016)."""
    # erf is the quotient of two polynomials of Eigen's, exact to 2e-7; beyond 4 it is 1 to float32
    z = v.maximum(v.minimum(x * math.sqrt(0.5), 4.0), -4.0)
    square, above, below = z * z, _ERF[0][0], _ERF[1][0]
    for factor in _ERF[0][1:]:
        above = v.fma(square, above, factor)
    for factor in _ERF[1][1:]:
        below = v.fma(square, below, factor)
    return 0.5 * x * (1.0 + z * above / below)


def gelu_quick(v: Vocabulary, x: Any) -> Any:
    """x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return x * v.sigmoid(1.702 * x)


def relu(v: Vocabulary, x: Any) -> Any:
    """max(x, 0)."""
    return v.maximum(x, 0.0)


def relu_squared(v: Vocabulary, x: Any) -> Any:
    """max(x, 0)^2 (So et al. 2021)."""
    positive = v.maximum(x, 0.0)
    return positive * positive


def never(v: Vocabulary, x: Any) -> Any:
    """Minus infinity, for logits of tokens that cannot come next."""
    return v.minimum(x, -math.inf)


def sigmoid(v: Vocabulary, x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return v.sigmoid(x)


def tanh(v: Vocabulary, x: Any) -> Any:
    """Hyperbolic tangent."""
    return v.tanh(x)


def softplus(v: Vocabulary, x: Any) -> Any:
    """log(1 + e^x); x itself above 20, as GGML."""
    return v.where(x > 20.0, x, v.log(1.0 + v.exp(v.minimum(x, 20.0))))


def exp(v: Vocabulary, x: Any) -> Any:
    """e^x."""
    return v.exp(x)


def swiglu(v: Vocabulary, gate: Any, up: Any) -> Any:
    """silu(gate) * up (Shazeer 2020)."""
    return silu(v, gate) * up


def geglu(v: Vocabulary, gate: Any, up: Any) -> Any:
    """gelu(gate) * up (Shazeer 2020)."""
    return gelu(v, gate) * up


def reglu(v: Vocabulary, gate: Any, up: Any) -> Any:
    """relu(gate) * up (Shazeer 2020)."""
    return relu(v, gate) * up


def swiglu_oai(v: Vocabulary, gate: Any, up: Any) -> Any:
    """Clamped SwiGLU with sigmoid(1.702 gate).

    g * sigmoid(1.702 g) * (u + 1), with g at most 7 and u from -7 to 7.
    """
    gate = v.minimum(gate, 7.0)
    up = v.maximum(v.minimum(up, 7.0), -7.0)
    return gate * v.sigmoid(gate * 1.702) * (up + 1.0)


@functools.cache
def swiglu_clamped(limit: float) -> Formula:
    """SwiGLU with inputs clamped: silu(min(gate, limit)) * u, u = up bounded to ±limit.

    As `ggml_swiglu_clamp`. Each limit has a kernel of its own.
    """

    def swiglu_clamped(v: Vocabulary, gate: Any, up: Any) -> Any:
        return silu(v, v.minimum(gate, limit)) * v.maximum(v.minimum(up, limit), -limit)

    return swiglu_clamped


@functools.cache
def swiglu_late_clamped(limit: float) -> Formula:
    """SwiGLU with clamped factors: min(silu(gate), limit) * u, u = up bounded to ±limit.

    Each limit has a kernel of its own.
    """

    def swiglu_late_clamped(v: Vocabulary, gate: Any, up: Any) -> Any:
        return v.minimum(silu(v, gate), limit) * v.maximum(v.minimum(up, limit), -limit)

    return swiglu_late_clamped


class Activation(enum.StrEnum):
    """Names of the gated activations: swiglu, geglu, reglu, swiglu_oai."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"
    SWIGLU_OAI = "swiglu_oai"

    @property
    def formula(self) -> Formula:
        """The function of (v, gate, up)."""
        return _GATED[self]


_GATED = {
    Activation.SWIGLU: swiglu,
    Activation.GEGLU: geglu,
    Activation.REGLU: reglu,
    Activation.SWIGLU_OAI: swiglu_oai,
}


def checked_activation(verb: str, activation: Activation | Formula | str) -> Activation | Formula:
    """Gated activation of a name or function. Raises PluginError listing the names."""
    if callable(activation):
        return activation
    try:
        return Activation(activation)
    except ValueError:
        names = ", ".join(Activation)
        raise PluginError(f"{verb}: activation must be one of {names} or a function, not {activation!r}") from None


def formula_of(activation: Activation | Formula) -> Formula:
    """Function of an activation name; functions are returned unchanged."""
    return activation.formula if isinstance(activation, Activation) else activation

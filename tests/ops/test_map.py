"""Activations of an MLP without gate, against formulas in float64."""

import numpy as np
import pytest

from llamacli import PluginError
from llamacli.engine import Engine
from llamacli.ops import activations
from verbs import Run

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softplus": lambda x: np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))),
}


@pytest.mark.parametrize("factor", [1.0, 100.0])
@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str, factor: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.map(g.scale(x, factor), getattr(activations, name)))
    run.check(FORMULAS[name](factor * run.x))


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_exp(factor: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.map(g.scale(x, factor), activations.exp))
    run.check(np.exp(factor * run.x))


def test_a_function_of_the_callers_own(engine: Engine) -> None:
    run = Run(
        engine, lambda g, param, x: g.map(x, lambda v, x: v.where(x > 0.5, v.sqrt(v.absolute(x)), v.log(x * x + 1)))
    )
    run.check(np.where(run.x > 0.5, np.sqrt(np.abs(run.x)), np.log(run.x**2 + 1)))


def test_branches_in_a_formula_are_refused(engine: Engine) -> None:
    with pytest.raises(PluginError, match=r"verb Map of tests, before the first layer failed: .*(v\.where|ambiguous)"):
        Run(engine, lambda g, param, x: g.map(x, lambda v, x: x if x > 0 else 0 * x))

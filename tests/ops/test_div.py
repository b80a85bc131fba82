"""Quotients of values, and of values and vectors."""

import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from llamacli.ops.activations import exp
from verbs import WIDTH, Run


def test_div(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.div(g.scale(x, 3.0), x))
    run.check(0 * run.x + 3)


def test_div_by_a_vector(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.div(x, param("vector", WIDTH)))
    run.check(run.x / run["vector"])


def test_div_by_one_number_a_token(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.div(g.map(x, exp), g.columns(x, 9, 1)))
    run.check(_exp(run.x) / run.x[:, 9:10])


def _exp(x):
    return 2.718281828459045**x


@pytest.mark.parametrize("width", [2, 63])
def test_misfits_are_refused(width: int) -> None:
    g = Graph()
    for divisor in (g.value(width), Param(Tensor("w", (width,)))):
        with pytest.raises(PluginError, match=rf"div: width 64 and shape \({width},\)"):
            g.div(g.value(64), divisor)

"""Gated linear units."""

import pytest

from llamacli import Activation, Graph, Value
from llamacli.engine import Engine
from llamacli.testing import formulas
from verbs import WIDTH, Params, Run


def test_swiglu(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.swiglu(g.linear(x, param("gate", 48, WIDTH)), g.linear(x, param("up", 48, WIDTH)))

    run = Run(engine, build)
    run.check(formulas.silu(formulas.linear(run.x, run["gate"])) * formulas.linear(run.x, run["up"]))


@pytest.mark.parametrize("activation", Activation)
def test_gated(activation: Activation, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        x = g.scale(x, 4.0)
        return g.gated(g.linear(x, param("gate", 48, WIDTH)), g.linear(x, param("up", 48, WIDTH)), activation)

    run = Run(engine, build)
    gate, up = formulas.linear(4 * run.x, run["gate"]), formulas.linear(4 * run.x, run["up"])
    assert min(gate.max(), up.max(), -up.min()) > 7, "the limits are reached"
    run.check(formulas.gated(gate, up, activation))

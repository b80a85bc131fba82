"""Gated linear units."""

from collections.abc import Callable

import numpy as np
import pytest

from llamacli import Activation, Graph, Value
from llamacli.engine import Engine
from llamacli.ops.activations import Formula, swiglu_clamped, swiglu_late_clamped
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


@pytest.mark.parametrize("function", [swiglu_clamped, swiglu_late_clamped])
@pytest.mark.parametrize("limit", [1.0, 7.0])
def test_clamped_swiglu(function: Callable[[float], Formula], limit: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.gated(g.scale(x, 20.0), g.scale(x, -20.0), function(limit)))
    gate, up = 20 * run.x, np.clip(-20 * run.x, -limit, limit)
    silu = formulas.silu(np.minimum(gate, limit) if function is swiglu_clamped else gate)
    assert gate.max() > limit
    run.check(np.minimum(silu, limit) * up)

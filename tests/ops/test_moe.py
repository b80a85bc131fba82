"""Mixtures of experts, by formulas in float64."""

import numpy as np
import pytest

from llamacli import Activation, Graph, Value
from llamacli.engine import Engine
from llamacli.graph import Param
from llamacli.testing import formulas
from verbs import WIDTH, Params, Run


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("n_expert", "n_used", "n_ff"), [(8, 2, 32), (4, 1, 32), (4, 4, 32), (5, 3, 32), (4, 2, 1000)])
def test_moe(n_expert: int, n_used: int, n_ff: int, renormalize: bool, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert, WIDTH))
        gate, up = (param(name, n_expert, n_ff, WIDTH) for name in ("gate", "up"))
        down = param("down", n_expert, WIDTH, n_ff)
        return g.moe(x, router, gate=gate, up=up, down=down, n_used=n_used, renormalize=renormalize)

    run = Run(engine, build)
    expected = np.zeros_like(run.x)
    for row, out in zip(run.x, expected, strict=True):
        scores = run["router"] @ row
        p = np.exp(scores - scores.max())
        p /= p.sum()
        chosen = sorted(range(n_expert), key=lambda expert: -p[expert])[:n_used]
        total = sum(p[expert] for expert in chosen) if renormalize else 1
        for expert in chosen:
            hidden = formulas.silu(run["gate"][expert] @ row) * (run["up"][expert] @ row)
            out += p[expert] / total * (run["down"][expert] @ hidden)
    run.check(expected)


@pytest.mark.parametrize("activation", Activation)
def test_experts_with_biases_scales_and_fused_weights(activation: Activation, engine: Engine) -> None:
    n_expert, n_used, n_ff = 6, 2, 24

    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert, WIDTH, bias=True))
        gate, up = param("gate_up", n_expert, 2 * n_ff, WIDTH, bias=True).split(n_ff, n_ff)
        down = param("down", n_expert, WIDTH, n_ff, bias=True)
        down = Param(down.weight, down.bias, param("scale", n_expert).weight)
        return g.moe(x, router, gate=gate, up=up, down=down, n_used=n_used, activation=activation)

    run = Run(engine, build)
    expected = np.zeros_like(run.x)
    for row, out in zip(run.x, expected, strict=True):
        scores = run["router"] @ row + run["router.bias"]
        chosen = np.argsort(-scores)[:n_used]
        p = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for share, expert in zip(p, chosen, strict=True):
            gate, up = np.split(run["gate_up"][expert] @ row + run["gate_up.bias"][expert], 2)
            hidden = run["down"][expert] @ formulas.gated(gate, up, activation) + run["down.bias"][expert]
            out += share * run["scale"][expert] * hidden
    run.check(expected)


@pytest.mark.parametrize("shared_by", [1, 2, 3])
def test_experts_that_neighbouring_logits_share(shared_by: int, engine: Engine) -> None:
    n_expert, n_used, n_ff = 4, 3, 24

    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert * shared_by, WIDTH))
        gate, up = (param(name, n_expert, n_ff, WIDTH) for name in ("gate", "up"))
        down = param("down", n_expert, WIDTH, n_ff)
        return g.moe(x, router, gate=gate, up=up, down=down, n_used=n_used, shared_by=shared_by)

    run = Run(engine, build)
    expected, repeated = np.zeros_like(run.x), 0
    for row, out in zip(run.x, expected, strict=True):
        scores = run["router"] @ row
        chosen = np.argsort(-scores)[:n_used] // shared_by
        p = np.exp(scores)[chosen] / np.exp(scores)[chosen].sum()
        repeated += len({*chosen}) < n_used
        for share, expert in zip(p, chosen, strict=True):
            hidden = formulas.silu(run["gate"][expert] @ row) * (run["up"][expert] @ row)
            out += share * (run["down"][expert] @ hidden)
    assert shared_by == 1 or repeated
    run.check(expected)

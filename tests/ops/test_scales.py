"""Scales stored beside matrices: one number, or one an expert."""

import numpy as np
import pytest

from llamacli import Graph, Value
from llamacli.engine import Engine
from llamacli.graph import Param
from llamacli.testing import formulas
from verbs import WIDTH, Params, Run


def scaled(param: Params, name: str, *shape: int, bias: bool = False) -> Param:
    p = param(name, *shape, bias=bias)
    return Param(p.weight, p.bias, param(f"{name}_scale", shape[0] if len(shape) > 2 else 1).weight)


@pytest.mark.parametrize("bias", [False, True])
def test_the_scale_of_a_matrix_comes_before_its_bias(bias: bool, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, scaled(param, "up", 24, WIDTH, bias=bias)))
    run.check(formulas.linear(run.x, run["up"]) * run["up_scale"] + (run["up.bias"] if bias else 0))


def test_the_scale_may_come_last(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, scaled(param, "up", 24, WIDTH, bias=True), scale_last=True))
    run.check((formulas.linear(run.x, run["up"]) + run["up.bias"]) * run["up_scale"])


def test_the_scale_of_an_embedding(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.embed(scaled(param, "table", 20, WIDTH)))
    run.check(run["table"][run.tokens] * run["table_scale"])


def test_parts_of_a_fused_matrix_share_its_scale(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        first, second = scaled(param, "fused", 40, WIDTH).split(23, 17)
        return g.linear(x, second) + g.columns(g.linear(x, first), 0, 17)

    run = Run(engine, build)
    whole = formulas.linear(run.x, run["fused"]) * run["fused_scale"]
    run.check(whole[:, 23:] + whole[:, :17])


@pytest.mark.parametrize("bias", [False, True])
def test_scales_of_experts(bias: bool, engine: Engine) -> None:
    n_expert, n_used, n_ff = 5, 2, 24

    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert, WIDTH))
        gate, up = (scaled(param, name, n_expert, n_ff, WIDTH, bias=bias) for name in ("gate", "up"))
        return g.moe(x, router, gate=gate, up=up, down=scaled(param, "down", n_expert, WIDTH, n_ff), n_used=n_used)

    run = Run(engine, build)
    expected = np.zeros_like(run.x)
    for row, out in zip(run.x, expected, strict=True):
        p = np.exp(run["router"] @ row)
        chosen = np.argsort(-p)[:n_used]
        for e in chosen:
            gate, up = (
                run[f"{name}_scale"][e] * (run[name][e] @ row) + (run[f"{name}.bias"][e] if bias else 0)
                for name in ("gate", "up")
            )
            out += p[e] / p[chosen].sum() * run["down_scale"][e] * (run["down"][e] @ (formulas.silu(gate) * up))
    run.check(expected)

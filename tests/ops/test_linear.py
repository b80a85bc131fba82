"""Linear layers: biases, residuals, parts of fused weights."""

import pytest

from llamacli import Graph, PluginError, Value
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from llamacli.testing import formulas
from verbs import WIDTH, Params, Run


@pytest.mark.parametrize("n_out", [16, 24, 80, 3])
def test_linear(n_out: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, param("up", n_out, WIDTH, bias=True)))
    run.check(formulas.linear(run.x, run["up"]) + run["up.bias"])


@pytest.mark.parametrize("product_is_first", [True, False])
def test_product_added_to_a_later_value(product_is_first: bool, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        product = g.linear(x, param("w", WIDTH, WIDTH))
        later = g.rms_norm(x, None, 1e-6)
        return (product + later if product_is_first else later + product) + later

    run = Run(engine, build)
    run.check(formulas.linear(run.x, run["w"]) + 2 * formulas.rms_norm(run.x, 1.0, 1e-6))


def test_rows_of_a_fused_weight(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        first, second = param("fused", 40, WIDTH, bias=True).split(23, 17)
        return g.linear(x, second) + g.columns(g.linear(x, first), 3, 17)

    run = Run(engine, build)
    whole = formulas.linear(run.x, run["fused"]) + run["fused.bias"]
    run.check(whole[:, 23:] + whole[:, 3:20])


@pytest.mark.parametrize("mode", ["fp32", "q8"])
def test_single_matrices_of_a_weight_with_several(mode: str, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        groups = param("groups", 3, 24, WIDTH, bias=True)
        return g.linear(x, groups.matrix(2)) + g.scale(g.linear(x, groups.matrix(0)), 2.0)

    run = Run(engine, build, mode=mode)
    first, _, last = (formulas.linear(run.x, run["groups"][i]) + run["groups.bias"][i] for i in range(3))
    run.check(2 * first + last, 1e-12 if mode == "fp32" else 2e-3)


def test_matrices_that_do_not_exist_are_refused() -> None:
    groups = Param(Tensor("w.weight", (3, 8, 16)))
    for param, group in ((groups, 3), (groups, -1), (Param(Tensor("w.weight", (8, 16))), 0)):
        with pytest.raises(PluginError, match=rf"w\.weight .* has no matrix {group}"):
            param.matrix(group)
    with pytest.raises(PluginError, match="or it has a scale"):
        Param(groups.weight, scale=Tensor("w.scale", (3,))).matrix(0)


def test_rows_of_partial_blocks_can_be_requantized(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.linear(g.linear(x, param("up", 44, WIDTH)), param("down", 20, 44))

    run = Run(engine, build, mode="q8")
    expected = formulas.linear(formulas.linear(run.x, run["up"]), run["down"])
    assert formulas.nmse(run.logits, formulas.linear(expected, run["output"])) < 2e-3

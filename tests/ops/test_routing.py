"""Choice and weights of experts, against llama.cpp's rules written out."""

from typing import Any

import numpy as np
import pytest

from llamacli import Graph, PluginError, Value
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from llamacli.ops.activations import relu_squared
from llamacli.ops.moe import Scoring
from llamacli.testing import formulas
from verbs import WIDTH, Params, Run

N_EXPERT, N_FF = 8, 24


def scores(scoring: Scoring, z: np.ndarray) -> np.ndarray:
    match scoring:
        case Scoring.SOFTMAX:
            return np.exp(z) / np.exp(z).sum()
        case Scoring.SIGMOID:
            return 1 / (1 + np.exp(-z))
        case Scoring.SQRT_SOFTPLUS:
            return np.sqrt(np.log1p(np.exp(z)))
        case Scoring.SOFTMAX_OF_CHOSEN:
            return z


def expected(run: Run, *, n_used: int, renormalize: bool = True, **options: Any) -> np.ndarray:
    out = np.zeros_like(run.x)
    scoring, groups = options.get("scoring", Scoring.SOFTMAX), options.get("groups")
    for row, result in zip(run.x, out, strict=True):
        p = scores(scoring, run["router"] @ row)
        ranking = p + run["selection"] if "selection_bias" in options else p.copy()
        if groups:
            sums = [sum(sorted(group)[-2:]) for group in ranking.reshape(groups[0], -1)]
            best = sorted(range(groups[0]), key=lambda g: -sums[g])[: groups[1]]
            for e in range(N_EXPERT):
                if e // (N_EXPERT // groups[0]) not in best:
                    ranking[e] = -np.inf
        chosen = sorted(range(N_EXPERT), key=lambda e: -ranking[e])[:n_used]
        w = p[chosen]
        if scoring is Scoring.SOFTMAX_OF_CHOSEN:
            w = np.exp(w) / np.exp(w).sum()
        if renormalize:
            w = w / w.sum()
        w = w * options.get("weight_scale", 1.0)
        for e, weight in zip(chosen, w, strict=True):
            x = row * weight if options.get("weigh_input") else row
            up = run["up"][e] @ x
            gated = "gate" not in options
            hidden = formulas.silu(run["gate"][e] @ x) * up if gated else np.maximum(up, 0) ** 2
            result += (1 if options.get("weigh_input") else weight) * (run["down"][e] @ hidden)
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    **{scoring.name.lower(): {"scoring": scoring} for scoring in Scoring},
    "not renormalized": {"scoring": Scoring.SIGMOID, "renormalize": False},
    "weight scale": {"scoring": Scoring.SIGMOID, "weight_scale": 2.5},
    "selection bias": {"scoring": Scoring.SIGMOID, "selection_bias": True},
    "selection bias on softmax": {"selection_bias": True},
    "groups": {"scoring": Scoring.SIGMOID, "selection_bias": True, "groups": (4, 2)},
    "groups of softmax": {"groups": (2, 1)},
    "input weighed": {"scoring": Scoring.SIGMOID, "renormalize": False, "weigh_input": True},
    "no gate": {"gate": None, "activation": relu_squared},
    "no gate, input weighed": {"gate": None, "activation": relu_squared, "weigh_input": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n_used", [1, 3])
def test_experts_and_weights(n_used: int, options: dict[str, Any], engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", N_EXPERT, WIDTH))
        parts = {"gate": param("gate", N_EXPERT, N_FF, WIDTH), "up": param("up", N_EXPERT, N_FF, WIDTH)}
        parts["down"] = param("down", N_EXPERT, WIDTH, N_FF)
        given = parts | options | {"n_used": n_used}
        if "selection_bias" in options:
            given["selection_bias"] = param("selection", N_EXPERT)
        return g.moe(x, router, **given)

    run = Run(engine, build)
    run.check(expected(run, n_used=n_used, **options), bound=1e-11)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"groups": (3, 1)}, "1 of 3 groups and 8 experts"),
        ({"groups": (4, 0)}, "0 of 4 groups and 8 experts"),
        ({"groups": (8, 4)}, "4 of 8 groups and 8 experts"),
        ({"groups": (4, 1)}, "1 of 4 groups and 8 experts"),
        ({"selection_bias": Param(Tensor("b.bias", (7,)))}, "a selection bias and 8 logits"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], found: str) -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, 16))))
    router = graph.linear(x, Param(Tensor("router.weight", (8, 16))))
    gate, up = (Param(Tensor(f"{name}.weight", (8, 4, 16))) for name in ("gate", "up"))
    with pytest.raises(PluginError, match=f"^moe: {found} do not fit together"):
        graph.moe(x, router, gate=gate, up=up, down=Param(Tensor("down.weight", (8, 16, 4))), n_used=3, **options)

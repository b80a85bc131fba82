"""Norms with biases, weights a head, and without weights."""

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from llamacli.testing import formulas
from verbs import WIDTH, Run


def layer_norm(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm(eps: float, bias: bool, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.layer_norm(x, param("norm", WIDTH, bias=bias), eps))
    run.check(layer_norm(run.x, eps) * run["norm"] + (run["norm.bias"] if bias else 0))


@pytest.mark.parametrize("width", [40, 64])
def test_layer_norm_without_weight_leaves_the_padding_zero(width: int, engine: Engine) -> None:
    """Rounding to Q8_0 would see what is there."""
    run = Run(engine, lambda g, param, x: g.layer_norm(g.columns(x, 0, width), None, 1e-5))
    run.check(layer_norm(run.x[:, :width], 1e-5))


@pytest.mark.parametrize("verb", ["rms_norm", "layer_norm"])
def test_weights_of_each_head(verb: str, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: getattr(g, verb)(x, param("norm", 4, 16), 1e-6, 16))
    heads = run.x.reshape(len(run.x), 4, 16)
    normed = layer_norm(heads, 1e-6) if verb == "layer_norm" else formulas.rms_norm(heads, 1.0, 1e-6)
    run.check((normed * run["norm"]).reshape(run.x.shape))


@pytest.mark.parametrize("head_dim", [64, 16, 8])
def test_rms_norm_with_bias(head_dim: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", head_dim, bias=True), 1e-6, head_dim))
    heads = run.x.reshape(len(run.x), -1, head_dim)
    run.check((formulas.rms_norm(heads, run["norm"], 1e-6) + run["norm.bias"]).reshape(run.x.shape))


def test_weights_that_do_not_fit_are_named() -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (8, 32))))
    with pytest.raises(PluginError, match=r"^layer_norm: n.weight \(3, 16\) on width 16 do not fit together"):
        graph.layer_norm(x, Param(Tensor("n.weight", (3, 16))), 1e-5, 16)

"""Operators of Python on symbolic values."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llamacli import Graph, PluginError, Value
from llamacli.graph import Param, Tensor


@pytest.fixture
def x() -> Value:
    g = Graph()
    return g.embed(Param(Tensor("token_embd.weight", (50, 8))))


@pytest.mark.parametrize(
    ("use", "verb"),
    [
        (lambda x: x * 2, "g.scale"),
        (lambda x: 2 * x, "g.scale"),
        (lambda x: np.float32(2) * x, "g.map"),
        (lambda x: x / 2, "g.scale"),
        (lambda x: -x, r"g.scale\(b, -1\)"),
        (lambda x: x - x, "g.scale"),
        (lambda x: x + 1.0, r"g.add\(x, param\)"),
        (lambda x: 1.0 + x, "g.add"),
        (lambda x: x[:, :4], "g.columns"),
        (lambda x: list(x), "g.columns"),
        (lambda x: x @ np.ones((8, 8)), "g.linear"),
        (lambda x: np.ones((8, 8)) @ x, "g.map"),
        (lambda x: x**2, "g.map"),
        (lambda x: abs(x), "g.map"),
        (lambda x: x > 0, "g.map"),
        (lambda x: np.exp(x), "g.map"),
        (lambda x: math.exp(x), "g.map"),
        (lambda x: np.asarray(x), "g.map"),
    ],
)
def test_operators_name_the_verb_to_use(use: Callable[[Value], object], verb: str, x: Value) -> None:
    with pytest.raises(PluginError, match=f"is not recorded: .*{verb}"):
        use(x)


def test_verbs_that_a_graph_lacks_are_not_named(x: Value) -> None:
    with pytest.raises(PluginError) as raised:
        _ = x * x
    assert ("g.mul" in str(raised.value)) == hasattr(Graph, "mul")


def test_values_are_true_and_compared_by_identity(x: Value) -> None:
    assert x
    assert x == x
    assert x != Value(x.graph, 8)
    assert (x + x).width == 8

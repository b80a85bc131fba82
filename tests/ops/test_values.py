"""Operators of Python on symbolic values."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llamacli import Graph, PluginError, Value
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from verbs import WIDTH, Params, Run


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


def test_sum_of_values(x: Value) -> None:
    assert sum([x, x, x]).width == 8
    assert [type(op).__name__ for op in x.graph.ops] == ["Embed", "Add", "Add"]


@pytest.mark.parametrize("verb", ["linear", "batched_linear", "add", "mul", "div"])
@pytest.mark.parametrize(
    ("given", "said"), [(None, "the parameter is None; check optional ones"), (2.5, "2.5 is no par")]
)
def test_parameters_that_are_none_are_named(verb: str, given: object, said: str, x: Value) -> None:
    with pytest.raises(PluginError, match=f"^{verb}: {said}"):
        getattr(x.graph, verb)(x, given)


def test_verbs_that_a_graph_lacks_are_not_named(x: Value) -> None:
    with pytest.raises(PluginError) as raised:
        _ = x * x
    assert ("g.mul" in str(raised.value)) == hasattr(Graph, "mul")


def test_values_are_true_and_compared_by_identity(x: Value) -> None:
    assert x
    assert x == x
    assert x != Value(x.graph, 8)
    assert (x + x).width == 8


@pytest.mark.parametrize("stored", [(5, 1, 1, WIDTH), (5 * WIDTH,), (1, 5, WIDTH)])
def test_reshaped_parameters_are_split(stored: tuple[int, ...], engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        rows = param("mixes", *stored).reshaped(5, WIDTH).split(1, 3, 1)
        first, last = (g.mul(x, row.reshaped(WIDTH)) for row in (rows[0], rows[2]))
        middle = rows[1].split(1, 2)[1].split(1, 1)[0]
        return first + g.scale(last, 2.0) + g.add(x, middle.reshaped(WIDTH))

    run = Run(engine, build)
    mixes = run["mixes"].reshape(5, WIDTH)
    run.check(run.x * mixes[0] + 2 * run.x * mixes[4] + run.x + mixes[2])


def test_reshaped_parameters_have_matrices(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        whole = param("fused", 6, 1, 8, WIDTH)
        parts = [*whole.reshaped(3, 16, WIDTH).split(6, 10), *whole.reshaped(48, WIDTH).split(8, 40)]
        q, k, v = parts[1].matrix(2), parts[2], parts[3]
        return g.columns(g.linear(x, v), 3, 8) + g.linear(x, k) + g.columns(g.linear(x, q), 2, 8)

    run = Run(engine, build)
    fused = run["fused"].reshape(48, WIDTH)
    run.check(run.x @ (fused[11:19] + fused[:8] + fused[40:48]).T)


def test_parameters_that_cannot_be_divided_are_refused(x: Value) -> None:
    mixes = Param(Tensor("mixes.weight", (4, 6, 8)))
    with pytest.raises(PluginError, match=r"mixes.weight \(4, 6, 8\) cannot be reshaped to \(4, 6, 9\)"):
        mixes.reshaped(4, 6, 9)
    with pytest.raises(PluginError, match=r"mixes.weight \(192,\) has 0 rows; it cannot be split into 1 \+ 1"):
        mixes.reshaped(192).split(1, 1)
    with pytest.raises(PluginError, match=r"has 6 rows; it cannot be split into -1 \+ 7"):
        mixes.split(-1, 7)
    part = mixes.split(2, 4)[0].reshaped(8, 8)
    for divide in (lambda: part.split(4, 4), lambda: part.reshaped(2, 4, 8).matrix(0)):
        with pytest.raises(PluginError, match=r"mixes.weight: .* made of rows of \(4, 6, 8\), has no rows"):
            divide()
    for matrix in (part, mixes.reshaped(12, 16).split(4, 8)[0]):
        with pytest.raises(PluginError, match=r"linear: mixes.weight, rows of 8 numbers in the file, cannot be a mat"):
            x.graph.linear(x.graph.repeat(x, 8, matrix.weight.shape[1] // 8, tiled=True), matrix)


@pytest.mark.parametrize(
    "tensor", [Tensor("w", (3, 8)), Tensor("w", (2, 8), 3, whole=(4, 8)), Tensor("w", (8, 4), group=5)]
)
def test_arrays_of_other_sizes_are_refused(tensor: Tensor) -> None:
    with pytest.raises(PluginError, match=r"w: \(\d, \d\) cannot be read of a stored tensor"):
        tensor.rows_of(np.zeros((4, 8)))

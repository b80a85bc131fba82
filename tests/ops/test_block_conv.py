"""Convolutions of blocks in both engines against sums written out."""

import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph
from verbs import Params, Run, Value


@pytest.mark.parametrize(("side", "n_taps", "group"), [(0, 3, 16), (1, 4, 8), (0, 30, 32)])
def test_sums_of_all_taps(engine: Engine, side: int, n_taps: int, group: int) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        factors = g.linear(x, param("factors", 2 * n_taps * x.width // group, x.width))
        return g.block_conv(x, param("base", 2, n_taps, x.width), factors, side)

    run = Run(engine, build)
    n, width = run.x.shape
    factors = (run.x @ run["factors"].T).reshape(n, 2, n_taps, width // group)
    expected = np.zeros((n, width))
    for t in range(n):
        for j in range(min(n_taps, t + 1)):
            for c in range(width):
                weight = run["base"][side, j, c] + factors[t, side, j, c // group]
                expected[t, c] += weight * run.x[t - j, c]
    run.check(expected)


@pytest.mark.parametrize(
    ("shape", "n_factors", "side"),
    [((2, 3, 32), 24, 0), ((2, 3, 64), 25, 0), ((2, 3, 64), 18, 0), ((2, 3, 64), 24, 2), ((3, 64), 24, 0)],
)
def test_shapes_that_do_not_fit_are_refused(engine: Engine, shape: tuple[int, ...], n_factors: int, side: int) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.block_conv(x, param("base", *shape), g.linear(x, param("factors", n_factors, x.width)), side)

    with pytest.raises(PluginError, match=r"block_conv: base.weight .* side \d and widths 64 and"):
        Run(engine, build)

"""Bounded values."""

import math

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from verbs import Run


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (0.05, math.inf), (-math.inf, 0.05)])
def test_clamp(low: float, high: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.clamp(x, low, high))
    run.check(np.clip(run.x, low, high))


def test_bounds_the_wrong_way_round_are_refused() -> None:
    g = Graph()
    with pytest.raises(PluginError, match=r"clamp: bounds 1\.0 and -1\.0"):
        g.clamp(g.value(4), 1.0, -1.0)

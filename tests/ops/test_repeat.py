"""Repeated heads."""

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from verbs import Run


@pytest.mark.parametrize("head_dim", [64, 16, 4])
def test_repeat(head_dim: int, engine: Engine) -> None:
    """Each head beside itself, as `torch.repeat_interleave`."""
    run = Run(engine, lambda g, param, x: g.repeat(x, head_dim, 3, tiled=False))
    heads = run.x.reshape(len(run.x), -1, head_dim)
    run.check(np.stack([heads, heads, heads], 2).reshape(len(run.x), -1))


@pytest.mark.parametrize("head_dim", [64, 16, 4])
def test_tiled_repeat(head_dim: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.repeat(x, head_dim, 3, tiled=True))
    run.check(np.hstack([run.x, run.x, run.x]))


@pytest.mark.parametrize(("head_dim", "times", "message"), [(24, 2, "head_dim 24 and width 64"), (16, 0, "0 times")])
def test_misfits_are_refused(head_dim: int, times: int, message: str) -> None:
    g = Graph()
    with pytest.raises(PluginError, match=f"repeat: {message}"):
        g.repeat(g.value(64), head_dim, times, tiled=True)

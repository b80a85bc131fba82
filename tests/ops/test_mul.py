"""Products of values, and of values with vectors."""

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from verbs import WIDTH, Run


def test_mul(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.mul(x, g.scale(x, 0.5)))
    run.check(run.x * run.x / 2)


def test_mul_by_a_vector(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.mul(x, param("vector", WIDTH)))
    run.check(run.x * run["vector"])


def test_mul_by_one_number_a_token(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.mul(x, g.columns(x, 9, 1)))
    run.check(run.x * run.x[:, 9:10])


@pytest.mark.parametrize("head_dim", [64, 32, 16, 8, 1])
def test_mul_by_one_number_a_head(head_dim: int, engine: Engine) -> None:
    n_heads = WIDTH // head_dim
    run = Run(engine, lambda g, param, x: g.mul(x, g.columns(x, WIDTH - n_heads, n_heads), head_dim))
    run.check(run.x * np.repeat(run.x[:, WIDTH - n_heads :], head_dim, 1))


def test_mul_by_a_parameter_of_one_number_a_head(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.mul(x, param("factors", 4), 16))
    run.check(run.x * np.repeat(run["factors"], 16))


@pytest.mark.parametrize(
    ("width", "head_dim", "message"),
    [(2, None, r"width 64 and shape \(2,\)"), (4, 32, "head_dim 32"), (4, 24, "head_dim 24"), (64, 0, "head_dim 0")],
)
def test_misfits_are_refused(width: int, head_dim: int | None, message: str) -> None:
    g = Graph()
    x = g.value(64)
    with pytest.raises(PluginError, match=f"mul: .*{message}"):
        g.mul(x, g.value(width), head_dim)
    with pytest.raises(PluginError, match=f"mul: .*{message}"):
        g.mul(x, Param(Tensor("w", (width,))), head_dim)

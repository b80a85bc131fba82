"""Multiplication by numbers."""

from llamacli.engine import Engine
from verbs import Run


def test_scale(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.scale(g.scale(x, param("factor", 1)), 2.5))
    run.check(run.x * run["factor"] * 2.5)

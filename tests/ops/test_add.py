"""Sums of values."""

from llamacli.engine import Engine
from verbs import Run


def test_add(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x + g.add(x, x))
    run.check(3 * run.x)

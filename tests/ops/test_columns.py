"""Selected columns."""

from llamacli.engine import Engine
from verbs import Run


def test_columns(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.columns(x, 5, 40))
    run.check(run.x[:, 5:45])

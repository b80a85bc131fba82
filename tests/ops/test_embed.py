"""Embedding lookup."""

from llamacli.engine import Engine
from verbs import Run


def test_embed(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x)
    run.check(run.x)

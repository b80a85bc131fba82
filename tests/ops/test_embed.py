"""Embedding lookup."""

import pytest

from llamacli.engine import Engine
from verbs import Run


def test_embed(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x)
    run.check(run.x)


@pytest.mark.parametrize("substitutes", [{}, {3: 9, 11: 0}])
def test_scale_and_substitutes(substitutes: dict[int, int], engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.embed(param("other", 20, 64), 2.5, substitutes=substitutes))
    run.check(2.5 * run["other"][[substitutes.get(token, token) for token in run.tokens]])

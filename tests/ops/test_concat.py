"""Concatenated heads."""

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from verbs import Run


@pytest.mark.parametrize(("da", "db"), [(16, 16), (32, 5), (4, 40), (1, 1)])
def test_concat_of_each_head(da: int, db: int, engine: Engine) -> None:
    heads = min(64 // da, 64 // db)
    run = Run(
        engine, lambda g, param, x: g.concat(g.columns(x, 0, heads * da), g.columns(x, 0, heads * db), of=(da, db))
    )
    a, b = (run.x[:, : heads * d].reshape(-1, heads, d) for d in (da, db))
    run.check(np.concatenate([a, b], -1).reshape(len(run.x), -1))


def test_concat_of_whole_rows(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.concat(x, g.columns(x, 1, 33)))
    run.check(np.hstack([run.x, run.x[:, 1:34]]))


@pytest.mark.parametrize("single_first", [False, True])
def test_a_single_head_is_that_of_all(single_first: bool, engine: Engine) -> None:
    def build(g, param, x):
        one = g.columns(x, 7, 9)
        return g.concat(one, x, of=(9, 16)) if single_first else g.concat(x, one, of=(16, 9))

    run = Run(engine, build)
    heads, one = run.x.reshape(-1, 4, 16), np.repeat(run.x[:, None, 7:16], 4, 1)
    parts = [one, heads] if single_first else [heads, one]
    run.check(np.concatenate(parts, -1).reshape(len(run.x), -1))


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ((16, 8), "4 and 3 heads"),
        ((10, 8), "heads of 10 and 8 numbers and widths 64 and 24"),
        ((16, 0), "heads of 16 and 0 numbers"),
    ],
)
def test_heads_that_do_not_match_are_refused(of: tuple[int, int], message: str) -> None:
    g = Graph()
    with pytest.raises(PluginError, match=f"concat: {message}"):
        g.concat(g.value(64), g.value(24), of=of)

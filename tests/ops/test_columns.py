"""Selected columns."""

import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from verbs import WIDTH, Run


def test_columns(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.columns(x, 5, 40))
    run.check(run.x[:, 5:45])


@pytest.mark.parametrize(("first", "width"), [(0, 16), (16, 16), (3, 25), (31, 1)])
def test_columns_of_each_head(first: int, width: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.columns(x, first, width, of=32))
    run.check(run.x.reshape(-1, 2, 32)[..., first : first + width].reshape(len(run.x), -1))


@pytest.mark.parametrize(
    ("first", "width", "of", "message"),
    [
        (60, 5, None, r"60 \+ 5 and width 64"),
        (-1, 5, None, "-1"),
        (0, 0, None, "width 64"),
        (8, 9, 16, r"8 \+ 9 and width 16"),
        (0, 4, 24, "heads of 24 numbers and width 64"),
        (0, 4, 0, "heads of 0 numbers"),
    ],
)
def test_columns_outside_are_refused(first: int, width: int, of: int | None, message: str) -> None:
    g = Graph()
    with pytest.raises(PluginError, match=f"columns: .*{message}"):
        g.columns(g.value(WIDTH), first, width, of)

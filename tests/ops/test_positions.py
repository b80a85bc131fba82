"""Learned positions."""

import pytest

from llamacli import Graph
from llamacli.engine import Engine
from llamacli.graph import Param, Tensor
from verbs import WIDTH, Run


@pytest.mark.parametrize("width", [WIDTH, 40])
def test_each_row_gets_its_positions_embedding(width: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.columns(x, 0, width) + g.positions(param("positions", 64, width)))
    run.check(run.x[:, :width] + run["positions"][: len(run.x)])


def test_the_table_limits_the_context() -> None:
    graph = Graph()
    assert graph.max_positions is None
    graph.positions(Param(Tensor("position_embd.weight", (64, 8))))
    assert graph.max_positions == 64

"""Deepstack in both engines: parts of wide rows of embeddings, and ids."""

import attrs
import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph
from llamacli.inputs import Inputs
from verbs import TOKENS, WIDTH, Run, span


def test_ids_keep_their_x(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.deepstack(x, 1))
    run.check(run.x)


def test_rows_add_their_parts(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.deepstack(g.scale(g.deepstack(x, 2), 0.5), 1))
    assert run.program.graph.embedding_width == 3 * WIDTH
    rows = np.random.RandomState(2).standard_normal((4, 3 * WIDTH)).astype(np.float32)
    at = [2, 3, 4, 9]
    inputs = Inputs.of(TOKENS, embeddings=rows, rows=at)
    given = attrs.evolve(span(run.program, len(TOKENS)), inputs=inputs)
    run.logits = run.program.forward(inputs.ids, [given], [len(TOKENS)])
    expected = run.x / 2
    first, second, third = np.split(rows, 3, 1)
    expected[at] = (first + third) / 2 + second
    run.check(expected)


def test_part_0_is_that_of_embed() -> None:
    graph = Graph()
    with pytest.raises(PluginError, match="deepstack: part 0 and rows"):
        graph.deepstack(graph.patches(8), 0)

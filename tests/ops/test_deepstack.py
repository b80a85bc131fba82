"""Deepstack in both engines: parts of wide rows of embeddings, and ids."""

from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import ArrayFile, Graph, QuantMode
from llamacli.engine import Engine, ReferenceEngine
from llamacli.engine.native import NativeEngine
from llamacli.errors import PluginError
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.inputs import Inputs
from suite import examples
from verbs import N_VOCAB, TOKENS, WIDTH, Run, span


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


@examples(10)
@given(width=st.integers(1, 100), part=st.integers(1, 3), at=st.sets(st.integers(0, len(TOKENS) - 1)))
def test_rows_of_random_shapes_add_their_parts(width: int, part: int, at: set[int]) -> None:
    """Sums have the bits of one addition, with any threads."""
    random = np.random.default_rng(width)
    graph, table = Graph(), random.standard_normal((N_VOCAB, width)).astype(np.float32)
    graph.deepstack(graph.embed(Param(Tensor("table", table.shape))), part)
    rows, n = random.standard_normal((len(at), (part + 1) * width)).astype(np.float32), len(TOKENS)
    expected = table[TOKENS]
    parts = np.split(rows, part + 1, 1)
    expected[sorted(at)] = parts[0] + parts[part]
    for engine in (ReferenceEngine(), NativeEngine(1), NativeEngine(3)):
        program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), {"table": table}), QuantMode.FP32)
        inputs = Inputs.of(TOKENS, embeddings=rows, rows=sorted(at)) if at else Inputs.of(TOKENS)
        whole = attrs.evolve(span(program, n), inputs=inputs)
        np.testing.assert_array_equal(program.forward(inputs.ids, [whole], [n]), expected)
        np.testing.assert_array_equal(program.forward(inputs.ids, [whole], [1]), expected[-1:])


def test_part_0_is_that_of_embed() -> None:
    graph = Graph()
    with pytest.raises(PluginError, match="deepstack: part 0 and rows"):
        graph.deepstack(graph.patches(8), 0)

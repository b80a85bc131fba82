"""Patches and merged rows in both engines against NumPy."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llamacli.engine import Engine, Span
from llamacli.engine.base import QuantMode
from llamacli.errors import PluginError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, Value
from llamacli.inputs import Inputs
from llamacli.kv import KVLayout, KVPool, KVSequence, KVType
from llamacli.loaders import ArrayFile

WIDTH = 20
ROWS = np.random.RandomState(7).standard_normal((24, WIDTH)).astype(np.float32)


def run(engine: Engine, record: Callable[[Graph, Value], Value], rows: np.ndarray, n_batch: int = 64) -> np.ndarray:
    graph = Graph()
    record(graph, graph.patches(WIDTH))
    graph.n_batch = n_batch
    program = engine.compile(graph, ArrayFile(Path("none"), Metadata({}, "none"), {}), QuantMode.FP32)
    n = len(rows)
    inputs = Inputs(np.zeros(n, np.int32), [0] * n, rows, np.arange(n), np.zeros((n, 1), np.int32))
    pool = KVPool(KVLayout.of(program.states, KVType.of("f32")), "test")
    with closing(KVSequence(pool, n)) as sequence:
        sequence.reserve(0, n)
        return program.forward(inputs.ids, [Span(sequence, 0, n, inputs=inputs)], [n // graph.n_merged])


@pytest.mark.parametrize("size", [1, 2, 4, 24])
def test_rows_are_merged(engine: Engine, size: int) -> None:
    merged = run(engine, lambda g, x: g.scale(g.merge_rows(x, size), 2), ROWS)
    np.testing.assert_array_equal(merged, 2 * ROWS.reshape(24 // size, -1))
    mean = run(engine, lambda g, x: g.scale(g.merge_rows(x, size, mean=True), 1), ROWS)
    np.testing.assert_allclose(mean, ROWS.reshape(24 // size, size, WIDTH).mean(1), atol=1e-6)


def test_the_result_may_be_the_merged_rows(engine: Engine) -> None:
    np.testing.assert_array_equal(run(engine, lambda g, x: g.merge_rows(x, 3), ROWS), ROWS.reshape(8, -1))


def test_values_of_several_layers(engine: Engine) -> None:
    def record(g: Graph, x: Value) -> Value:
        first, second = g.merge_rows(x, 2), g.merge_rows(g.scale(x, 3), 2)
        return g.concat(first, second)

    expected = ROWS.reshape(12, -1)
    np.testing.assert_array_equal(run(engine, record, ROWS), np.hstack([expected, 3 * expected]))


def test_more_rows_than_a_batch_of_text(engine: Engine) -> None:
    rows = np.random.RandomState(3).standard_normal((1200, WIDTH)).astype(np.float32)
    merged = run(engine, lambda g, x: g.scale(g.merge_rows(x, 4), 1), rows, n_batch=1200)
    np.testing.assert_array_equal(merged, rows.reshape(300, -1))


def test_operands_that_do_not_fit() -> None:
    graph = Graph()
    x = graph.patches(WIDTH)
    with pytest.raises(PluginError, match="patches: patches and ops before them"):
        graph.patches(WIDTH)
    with pytest.raises(PluginError, match="merge_rows: groups of 0 rows"):
        graph.merge_rows(x, 0)
    graph.merge_rows(x, 4)
    with pytest.raises(PluginError, match="merge_rows: groups of 2 and of 4 rows"):
        graph.merge_rows(x, 2)

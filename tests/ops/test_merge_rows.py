"""Patches and merged rows in both engines against NumPy."""

import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph, Value
from verbs import on_patches

WIDTH = 20
ROWS = np.random.RandomState(7).standard_normal((24, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 4, 24])
def test_rows_are_merged(engine: Engine, size: int) -> None:
    merged = on_patches(engine, lambda g, x: g.scale(g.merge_rows(x, size), 2), ROWS)
    np.testing.assert_array_equal(merged, 2 * ROWS.reshape(24 // size, -1))
    turns = on_patches(engine, lambda g, x: g.scale(g.merge_rows(x, size, interleaved=True), 1), ROWS)
    np.testing.assert_array_equal(
        turns,
        np.hstack([ROWS[i::size] for i in range(size)])
        .reshape(24 // size, size, WIDTH)
        .swapaxes(1, 2)
        .reshape(24 // size, -1),
    )
    mean = on_patches(engine, lambda g, x: g.scale(g.merge_rows(x, size, mean=True), 1), ROWS)
    np.testing.assert_allclose(mean, ROWS.reshape(24 // size, size, WIDTH).mean(1), atol=1e-6)


def test_the_result_may_be_the_merged_rows(engine: Engine) -> None:
    np.testing.assert_array_equal(on_patches(engine, lambda g, x: g.merge_rows(x, 3), ROWS), ROWS.reshape(8, -1))


def test_values_of_several_layers(engine: Engine) -> None:
    def record(g: Graph, x: Value) -> Value:
        first, second = g.merge_rows(x, 2), g.merge_rows(g.scale(x, 3), 2)
        return g.concat(first, second)

    expected = ROWS.reshape(12, -1)
    np.testing.assert_array_equal(on_patches(engine, record, ROWS), np.hstack([expected, 3 * expected]))


def test_more_rows_than_a_batch_of_text(engine: Engine) -> None:
    rows = np.random.RandomState(3).standard_normal((1200, WIDTH)).astype(np.float32)
    merged = on_patches(engine, lambda g, x: g.scale(g.merge_rows(x, 4), 1), rows)
    np.testing.assert_array_equal(merged, rows.reshape(300, -1))


def test_operands_that_do_not_fit() -> None:
    graph = Graph()
    x = graph.patches(WIDTH)
    with pytest.raises(PluginError, match="patches: patches and ops before them"):
        graph.patches(WIDTH)
    with pytest.raises(PluginError, match="merge_rows: groups of 0 rows"):
        graph.merge_rows(x, 0)
    with pytest.raises(PluginError, match="merge_rows: mean and interleaved"):
        graph.merge_rows(x, 4, mean=True, interleaved=True)
    graph.merge_rows(x, 4)
    with pytest.raises(PluginError, match="merge_rows: groups of 2 and of 4 rows"):
        graph.merge_rows(x, 2)

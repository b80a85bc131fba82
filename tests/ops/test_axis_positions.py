"""Position embeddings of columns and rows in both engines."""

import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph, Param, Tensor
from verbs import on_patches

WIDTH = 20


def test_rows_of_both_axes_are_added(engine: Engine) -> None:
    table = np.random.RandomState(5).standard_normal((14, WIDTH)).astype(np.float32)
    numbers = np.arange(12)
    positions = np.stack([numbers, numbers // 4, numbers % 4, 0 * numbers], -1).astype(np.int32)
    param = Param(Tensor("positions.weight", table.shape))
    patches = np.zeros((12, WIDTH), np.float32)
    found = on_patches(
        engine,
        lambda g, x: x + g.axis_positions(param),
        patches,
        positions=positions,
        weights={"positions.weight": table},
    )
    expected = [table[i % 4] + table[7 + i // 4] for i in range(12)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_table_of_one_axis() -> None:
    with pytest.raises(PluginError, match=r"axis_positions: positions.weight \(5, 20\) and the rows of two axes"):
        Graph().axis_positions(Param(Tensor("positions.weight", (5, WIDTH))))

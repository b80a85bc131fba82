"""Resized position embeddings against bilinear weights written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.engine import Engine, ReferenceEngine
from llamacli.errors import PluginError
from llamacli.graph import Graph, Param, Tensor
from verbs import on_patches

WIDTH = 20


def looked_up(engine: Engine, table: np.ndarray, rows: int, columns: int, **options: bool) -> np.ndarray:
    numbers = np.arange(rows * columns)
    positions = np.stack([numbers, numbers // columns, numbers % columns, 0 * numbers], -1).astype(np.int32)
    param = Param(Tensor("positions.weight", table.shape))
    patches = np.zeros((rows * columns, WIDTH), np.float32)
    return on_patches(
        engine,
        lambda g, x: x + g.grid_positions(param, **options),
        patches,
        positions=positions,
        weights={"positions.weight": table},
    )


def axis(side: int, n: int, align_corners: bool) -> np.ndarray:
    """Weights of bilinear interpolation, number by number, [n, side]."""
    out = np.zeros((n, side))
    for i in range(n):
        if align_corners:
            place, reach = (i * (side - 1) / (n - 1) if n > 1 and side > 1 else i * side / n), 1.0
        else:
            place, reach = (i + 0.5) * side / n - 0.5, max(1.0, side / n)
        for j in range(side):
            out[i, j] = max(0.0, 1 - abs(j - place) / reach)
        out[i] /= out[i].sum()
    return out


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_a_grid_is_interpolated(side: int, rows: int, columns: int, align_corners: bool) -> None:
    table = np.random.RandomState(side).standard_normal((side * side, WIDTH)).astype(np.float32)
    found = looked_up(ReferenceEngine(), table, rows, columns, align_corners=align_corners)
    grid = table.reshape(side, side, WIDTH)
    down, across = axis(side, rows, align_corners), axis(side, columns, align_corners)
    np.testing.assert_allclose(found, np.einsum("iy,jx,yxw->ijw", down, across, grid).reshape(-1, WIDTH), atol=2e-5)


def test_both_engines_agree_and_a_square_stays(engine: Engine) -> None:
    table = np.random.RandomState(1).standard_normal((25, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(looked_up(engine, table, 5, 5), table)
    expected = looked_up(ReferenceEngine(), table, 7, 3)
    np.testing.assert_allclose(looked_up(engine, table, 7, 3), expected, atol=1e-6)


def test_a_table_that_is_no_square() -> None:
    with pytest.raises(PluginError, match=r"grid_positions: positions.weight \(24, 20\) and the rows of a square grid"):
        Graph().grid_positions(Param(Tensor("positions.weight", (24, WIDTH))))

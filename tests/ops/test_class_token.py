"""The class token behind patches, in both engines."""

import numpy as np
import pytest

from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.graph import Graph, Param, Tensor
from verbs import on_patches

WIDTH = 20


def test_rows_behind_the_patches_have_the_embedding(engine: Engine) -> None:
    random = np.random.RandomState(3)
    rows, embedding = random.standard_normal((7, WIDTH)).astype(np.float32), np.arange(WIDTH, dtype=np.float32)
    positions = np.zeros((7, 4), np.int32)
    positions[5:, 3] = 1
    param = Param(Tensor("v.class_embd", (WIDTH,)))
    found = on_patches(
        engine,
        lambda g, x: g.class_token(x, param),
        rows,
        positions=positions,
        weights={"v.class_embd": embedding},
    )
    np.testing.assert_array_equal(found, np.vstack([rows[:5], [embedding] * 2]))


def test_an_embedding_of_another_width() -> None:
    graph = Graph()
    with pytest.raises(PluginError, match=r"class_token: v.class_embd \(24,\) and rows of 20"):
        graph.class_token(graph.patches(WIDTH), Param(Tensor("v.class_embd", (24,))))

"""Factor of queries that grows with the position."""

import math

import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine
from llamacli.engine.native import NativeEngine
from verbs import TOKENS, Run


@pytest.mark.parametrize(("scale", "length", "offset"), [(0.3, 4, 0), (0.1, 5, 1), (1.5, 1, 0)])
def test_attention_temperature(scale: float, length: int, offset: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.attention_temperature(x, scale, length, offset))
    factors = [1 + scale * math.log(math.floor((p + offset) / length) + 1) for p in range(len(TOKENS))]
    assert len(set(factors)) > 3
    run.check(run.x * np.array(factors)[:, None])


def test_nothing_changes_before_the_first_length() -> None:
    build = lambda g, param, x: g.attention_temperature(x, 0.3, len(TOKENS))  # noqa: E731
    changed, same = Run(NativeEngine(1), build), Run(NativeEngine(1), lambda g, param, x: x)
    np.testing.assert_array_equal(changed.logits, same.logits)


@pytest.mark.parametrize(("length", "offset"), [(0, 0), (8, -1)])
def test_numbers_out_of_range_are_refused(length: int, offset: int) -> None:
    g = Graph()
    with pytest.raises(PluginError, match=f"attention_temperature: length {length} and offset {offset}"):
        g.attention_temperature(g.value(4), 0.1, length, offset)

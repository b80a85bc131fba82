"""Kernels of every op on random shapes, compared with NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.engine.examples import op_classes
from llamacli.ops.base import Op
from llamacli.testing.conformance import check_example
from paths import entry_points, is_of_this_project
from random_graphs import FLOORS, INPUT_BOUNDS, MAKERS, N_TOKENS, NUDGED, made_ops, random_example
from suite import examples

WITHOUT = {
    "Lanewise",
    "StateOp",
    "CacheOp",
    "Store",
    "PreviousHidden",
    "Decoder",
    "Patches",
    "MergeRows",
    "AxisPositions",
    "ClassToken",
    "Signal",
    "OneHot",
    "GridPositions",
    "Deepstack",
    "Received",
    "Sent",
    "Gathered",
}
"""Base classes, the op that every attention needs, inputs that such graphs do not have, exchanges of nodes."""


def all_ops() -> set[type[Op]]:
    """Ops of the core, plugins and examples, without those of tests."""
    for entry in entry_points():
        entry.load()
    return {op for op in op_classes() if is_of_this_project(op) and op.__name__ not in WITHOUT}


def test_every_op_has_random_graphs() -> None:
    assert {op.__name__ for op in all_ops()} == {op.__name__ for op in made_ops()}


@pytest.mark.parametrize("name", MAKERS)
@examples(10)
@given(data=st.data())
def test_kernels_compute_what_numpy_does(name: str, data: st.DataObject) -> None:
    example = random_example(name, lambda low, high: data.draw(st.integers(low, high)))
    op = example.op.__name__
    n_tokens, floor = data.draw(st.integers(1, N_TOKENS)), FLOORS.get(op, 0.0)
    check_example(example, n_tokens, floor, input_bounds=op in INPUT_BOUNDS, nudged=op in NUDGED)


def test_statistical_topk_of_numbers_whose_squares_underflow() -> None:
    example = random_example("GaussianTopK-any", lambda low, high: low)
    for table in example.weights.values():
        table[:] = np.linspace(1e-23, 6e-23, table.shape[-1])
    check_example(example, 1)


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("SelectedAttention-any", [58381576, 2, 1, 1, 0, 1, 0, 0, 3, 0, 1, 23, 0, 23, 0, 0, 343]),
        ("Attention-both_ways", [2465, 1, 1, 24, 1, 0, 0, 0, 0, 0, 0, 511]),
    ],
)
def test_rounding_of_attention(name: str, draws: list[int]) -> None:
    """Scores of hundreds, and values that nearly cancel."""
    left = iter(draws)
    check_example(random_example(name, lambda low, high: next(left)), 6 if "Selected" in name else 5, nudged=True)

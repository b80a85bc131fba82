"""Merged logits, compared with the definition in float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from candidates import FINITE, exact_softmax, log_softmax
from llamacli import InvalidRequestError
from llamacli.sampling import merge_logits

ELEMENTS = st.one_of(FINITE, FINITE, st.just(-math.inf))
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 20)), elements=ELEMENTS)
WEIGHTS = st.one_of(st.floats(-4, 4), st.sampled_from([0.0, 1.0, -1.0]))


def reference(logits: np.ndarray, weights: list[float], alpha: float) -> np.ndarray | None:
    """Definition of merging, token by token; None if refused."""
    needed = [i for i, weight in enumerate(weights) if weight or (i == 0 and alpha)]
    if not any(weights) or any(logits[i].max() == -np.inf for i in needed):
        return None
    logs = {i: log_softmax(logits[i]) for i in needed}
    merged = np.full(logits.shape[1], -np.inf)
    for token in range(logits.shape[1]):
        used = [(weight, logs[i][token]) for i, weight in enumerate(weights) if weight]
        plausible = not alpha or logs[0][token] >= logs[0].max() + math.log(alpha)
        if plausible and all(log_p > -np.inf for _, log_p in used):
            merged[token] = math.fsum(weight * log_p for weight, log_p in used)
    return merged if (merged > -np.inf).any() else None


@given(MATRICES, st.data())
def test_weighted_sum_of_log_probabilities(logits: np.ndarray, data: st.DataObject) -> None:
    n = len(logits)
    weights = data.draw(st.lists(WEIGHTS, min_size=n, max_size=n))
    alpha = data.draw(st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(0, 1, exclude_min=True)))
    expected, given_ = reference(logits, weights, alpha), logits.copy()
    if expected is None:
        with pytest.raises(InvalidRequestError, match="cannot merge logits"):
            merge_logits(list(logits), weights, alpha=alpha)
        return
    merged = merge_logits(list(logits), weights, alpha=alpha)
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logits, given_)


@given(hnp.arrays(np.float32, st.integers(1, 20), elements=FINITE), st.floats(0, 2))
def test_weight_0_changes_nothing(logits: np.ndarray, strength: float) -> None:
    p = exact_softmax(logits)
    for merged in (
        merge_logits([logits], [1.0]),
        merge_logits([logits, logits], [1 + strength, -strength]),
        merge_logits([logits, logits * 0], [1.0, -strength]),
    ):
        np.testing.assert_allclose(exact_softmax(merged), p, rtol=1e-4, atol=1e-7)


def test_contrastive_decoding() -> None:
    expert = np.log(np.array([0.5, 0.4, 0.09, 0.01], np.float32))
    amateur = np.log(np.array([0.7, 0.1, 0.15, 0.05], np.float32))
    merged = merge_logits([expert, amateur], [1, -1], alpha=0.1)
    np.testing.assert_allclose(merged, [math.log(5 / 7), math.log(4), math.log(0.6), -np.inf], rtol=1e-5)
    merged = merge_logits([expert, amateur], [1, -1])
    assert merged[3] == pytest.approx(math.log(0.2))


def test_a_geometric_mean() -> None:
    one, other = (np.log(np.array(p, np.float32)) for p in ([0.8, 0.2], [0.2, 0.8]))
    np.testing.assert_allclose(exact_softmax(merge_logits([one, other], [0.5, 0.5])), [0.5, 0.5], rtol=1e-6)


ROW = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("logits", "weights", "alpha", "reason"),
    [
        ([], [], 0, "all weights are 0"),
        ([ROW, ROW], [0, 0], 0, "all weights are 0"),
        ([ROW, ROW], [1], 0, r"shapes \(3,\), \(3,\) with 1 weights"),
        ([ROW, ROW[:2]], [1, 1], 0, r"shapes \(3,\), \(2,\)"),
        ([ROW[None]], [1], 0, r"not \[1, 3\]"),
        ([ROW[:0]], [1], 0, r"shapes \(0,\)"),
        ([ROW], [math.nan], 0, "weight nan is not a finite number"),
        ([ROW], [math.inf], 0, "weight inf is not"),
        ([ROW], ["1"], 0, "weight '1' is not"),
        ([ROW], [True], 0, "weight True is not"),
        ([ROW], [1], -0.1, "alpha = -0.1 is not a number from 0 to 1"),
        ([ROW], [1], 1.5, "alpha = 1.5"),
        ([ROW], [1], math.nan, "alpha = nan"),
        ([ROW, ROW + np.float32(np.nan)], [1, 1], 0, r"the largest of logits\[1\] is nan"),
        ([ROW + np.float32(np.inf)], [1], 0, r"logits\[0\] is inf"),
        ([ROW - np.float32(np.inf)], [1], 0, r"logits\[0\] is -inf"),
        ([ROW - np.float32(np.inf), ROW], [0, 1], 0.5, r"logits\[0\] is -inf"),
        ([np.array([0, -np.inf], "f4"), np.array([-np.inf, 0], "f4")], [1, 1], 0, "no token is possible under all"),
        ([np.array([3e38, 0], "f4"), np.array([0, 3e38], "f4")], [1, -2], 0, "overflow float32"),
    ],
)
def test_invalid_arguments(logits: list, weights: list, alpha: float, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        merge_logits(logits, weights, alpha=alpha)

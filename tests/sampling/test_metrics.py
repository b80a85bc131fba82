"""Surprisal, entropy and perplexity, compared with float64 definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from candidates import FINITE, Logits
from llamacli import InvalidRequestError
from llamacli.sampling import Level, Metrics, entropy, perplexity_of, surprisal

ODD = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(FINITE, st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0])),
)
"""Logits of which some, or all, may not be finite."""


def probabilities(logits: Logits) -> np.ndarray:
    """Softmax of the finite logits by definition; 0 for all others."""
    p, finite = np.zeros(len(logits)), np.isfinite(logits)
    if finite.any():
        wide = logits[finite].astype(np.float64)
        p[finite] = np.exp(wide - wide.max())
        p /= p.sum()
    return p


@given(ODD)
def test_surprisal_is_negative_log_probability(logits: Logits) -> None:
    for token, p in enumerate(probabilities(logits)):
        value = surprisal(logits, token)
        assert value >= 0
        if p > 1e-300:
            assert value == pytest.approx(-math.log(p), rel=1e-9, abs=1e-9)
            assert surprisal(logits, token, base=2) == pytest.approx(-math.log2(p), rel=1e-9, abs=1e-9)
        else:
            assert math.isinf(value) == (not np.isfinite(logits[token]))


@given(ODD)
def test_entropy_is_the_expected_surprisal(logits: Logits) -> None:
    p = probabilities(logits)
    if not p.any():
        assert entropy(logits) == entropy(logits, base=2) == math.inf
        return
    expected = -sum(each * math.log(each) for each in p if each)
    assert entropy(logits) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert entropy(logits, base=2) == pytest.approx(expected / math.log(2), rel=1e-9, abs=1e-9)
    assert 0 <= entropy(logits) <= math.log(len(logits)) + 1e-9


@pytest.mark.parametrize("token", [-1, 3, 1.0, True, None])
def test_surprisal_of_invalid_tokens_is_infinite(token: int) -> None:
    assert surprisal(np.zeros(3, np.float32), token) == math.inf


@pytest.mark.parametrize("base", [1, 0, -2, math.nan, math.inf, "2", True])
def test_bases_are_above_1(base: float) -> None:
    for measure in (entropy, lambda logits, base: surprisal(logits, 0, base=base)):
        with pytest.raises(InvalidRequestError, match=r"base = .* is not a number above 1"):
            measure(np.zeros(3, np.float32), base=base)


@given(st.lists(st.one_of(st.floats(0, 50), st.just(math.inf)), max_size=30))
def test_perplexity_accumulates(surprisals: list[float]) -> None:
    level = Level()
    assert (level.surprisal, level.entropy, level.perplexity) == (math.inf,) * 3
    for i, value in enumerate(surprisals):
        level = level.after(value, 0.5)
        finite = [each for each in surprisals[: i + 1] if each < math.inf]
        assert (level.surprisal, level.n_tokens) == (value, len(finite))
        assert level.surprisal_bits == pytest.approx(value / math.log(2))
        assert level.entropy_bits == pytest.approx(0.5 / math.log(2))
        assert level.perplexity == (pytest.approx(math.exp(np.mean(finite))) if finite else math.inf)


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity_of(709.0, 1) == math.exp(709.0)
    assert perplexity_of(1500.0, 2) == math.inf
    assert Metrics().model.perplexity == Metrics().sampling.perplexity == math.inf


@given(st.integers(1, 60), st.integers(1, 20))
def test_uniform_distribution_has_perplexity_n(n: int, times: int) -> None:
    level = Level()
    for i in range(times):
        level = level.after(surprisal(np.zeros(n, np.float32), i % n), entropy(np.zeros(n, np.float32)))
    assert level.perplexity == pytest.approx(n)
    assert level.surprisal == pytest.approx(level.entropy)

"""Samplers with state that draw: Mirostat and adaptive-p."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candidates import LOGITS, Logits, apply
from llamacli import InvalidRequestError
from llamacli.sampling import (
    AdaptiveP,
    Draw,
    Dry,
    MinP,
    Mirostat,
    MirostatV2,
    SamplerChain,
    SamplerState,
    TopK,
    TopP,
    TypicalP,
    Xtc,
)

P = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
HALVING = np.log(P.astype(np.float32))


def mean_surprise(sampler: Mirostat | MirostatV2, logits: Logits, n: int = 3000) -> float:
    """Mean surprisal in bits of the drawn tokens, truncated ones excluded."""
    state, chain = SamplerState(2), SamplerChain([sampler])
    surprises = []
    for _ in range(n):
        token = state.sample(logits.copy(), chain)
        surprises.append(state.candidates.surprisal(state.candidates.ids.tolist().index(token)) / math.log(2))
        state.accept(token)
    return float(np.mean(surprises[n // 3 :]))


class TestMirostat:
    def test_version_2_drops_tokens_above_mu(self) -> None:
        for mu, left in ((0.5, 1), (1, 1), (2.01, 2), (3.01, 3), (4.01, 5)):
            candidates = apply(HALVING, MirostatV2(tau=mu / 2))
            assert len(candidates) == left, mu

    @pytest.mark.parametrize(
        ("n", "tau", "kept"), [(1000, 0.3, 100), (1000, 6.0, 1000), (129, 3.5, 100), (128, 3.5, 128)]
    )
    def test_version_1_with_equal_largest_logits(self, n: int, tau: float, kept: int) -> None:
        """k is an infinite power of 2**mu / (n - 1)."""
        logits = np.full(n, -3.0, np.float32)
        logits[:100] = 3
        assert len(apply(logits, Mirostat(tau=tau))) == kept

    def test_version_1_estimates_k_of_a_zipf_distribution(self) -> None:
        n, exponent, mu = 5000, 1.5, 6.0
        zipf = -exponent * np.log(np.arange(1, n + 1, dtype=np.float64)).astype(np.float32)
        k = ((exponent - 1) * 2**mu / (1 - n ** (1 - exponent))) ** (1 / exponent)
        assert len(apply(zipf, Mirostat(tau=mu / 2))) == int(k) > 5

    @pytest.mark.parametrize(
        "logits", [[0.0], [0.0, 0.0], [0.0] * 200, [1.0, -np.inf], [0.0, -1e30], [5.0, 4.0, -np.inf]]
    )
    @pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
    @pytest.mark.parametrize("tau", [0.0, 5.0, 1000.0])
    def test_odd_distributions(self, kind: type, logits: list[float], tau: float) -> None:
        candidates = apply(logits, kind(tau))
        assert logits[candidates.chosen] > -np.inf

    @pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
    def test_mu_is_updated_by_the_surprisal(self, kind: type) -> None:
        sampler = kind(tau=3.0, eta=0.5)
        assert sampler.mu == 6
        candidates = apply(np.zeros(4), sampler)
        sampler.accept(candidates.chosen)
        surprise = math.log2(len(candidates))
        assert sampler.mu == pytest.approx(6 - 0.5 * (surprise - 3))
        sampler.reset()
        assert sampler.mu == 6

    @pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
    def test_mu_ignores_tokens_that_are_not_accepted(self, kind: type) -> None:
        sampler = kind()
        candidates = apply(HALVING, sampler)
        sampler.accept(candidates.chosen + 1)
        sampler.accept(candidates.chosen)
        assert sampler.mu == 10

    @pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
    @pytest.mark.parametrize("tau", [1.5, 2.5, 3.5])
    def test_mean_surprisal_stays_near_tau(self, kind: type, tau: float) -> None:
        logits = -1.1 * np.log(np.arange(1, 1001, dtype=np.float32))
        assert mean_surprise(kind(tau), logits) == pytest.approx(tau, abs=0.1)


class TestAdaptiveP:
    def test_starts_at_the_target(self) -> None:
        sampler = AdaptiveP(0.25, decay=0.5)
        aimed = apply(HALVING, sampler)
        distance = np.abs(P - 0.25) / 0.3
        assert aimed.logits == pytest.approx(5 - 10 * distance**2 / (1 + distance), rel=1e-5)

    @given(st.floats(0, 1), st.floats(0, 0.99), st.integers(0, 20))
    def test_compensates_for_earlier_tokens(self, target: float, decay: float, seed: int) -> None:
        sampler = AdaptiveP(target, decay)
        first = apply(HALVING, sampler, seed=seed)
        sampler.accept(first.chosen)
        weight = 1 / (1 - decay)
        average = (P[first.chosen] + decay * target * weight) / (1 + decay * weight)
        aim = min(max(2 * target - average, 0), 1)
        distance = np.abs(P - aim) / 0.3
        assert apply(HALVING, sampler).logits == pytest.approx(
            5 - 10 * distance**2 / (1 + distance), rel=1e-4, abs=1e-4
        )

    @given(LOGITS, st.integers(0, 20))
    def test_a_negative_target_is_a_plain_draw(self, logits: Logits, seed: int) -> None:
        assert apply(logits, AdaptiveP(-0.5), seed=seed).chosen == apply(logits, Draw(), seed=seed).chosen

    def test_meets_the_target_in_the_long_run(self) -> None:
        for target in (0.15, 0.4):
            state, chain = SamplerState(3), SamplerChain([AdaptiveP(target)])
            drawn = []
            for _ in range(2000):
                token = state.sample(HALVING.copy(), chain)
                state.accept(token)
                drawn.append(P[token])
            assert np.mean(drawn) == pytest.approx(target, abs=0.03)


@pytest.mark.parametrize(
    ("kind", "names", "inside", "outside"),
    [
        (Mirostat, ("tau", "eta"), (0.0,), (-0.1,)),
        (MirostatV2, ("tau", "eta"), (0.0,), (-0.1,)),
        (AdaptiveP, ("target",), (-1.0, 1.0), (-1.1, 1.1)),
        (lambda decay: AdaptiveP(0.5, decay), ("decay",), (0.0, 0.99), (-0.1, 1.0)),
        (TopP, ("p",), (0.0, 1.0), (-0.1, 1.1)),
        (TypicalP, ("p",), (0.0, 1.0), (-0.1, 1.1)),
        (MinP, ("p",), (0.0, 1.1), (-0.1,)),
        (lambda probability: Xtc(probability, 0.5), ("probability",), (0.0, 1.0), (-0.1, 1.1)),
        (lambda threshold: Xtc(0.5, threshold), ("threshold",), (0.0, 1.0), (-0.1, 1.1)),
        (lambda multiplier: Dry(multiplier), ("multiplier",), (0.0,), (-0.1,)),
        (lambda base: Dry(1.0, base), ("base",), (1.0,), (0.9,)),
        (lambda allowed_length: Dry(1.0, 1.75, allowed_length), ("allowed_length",), (0,), (-1,)),
    ],
)
def test_limits(kind: type, names: tuple[str, ...], inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    for name in names:
        for value in inside:
            kind(**{name: value})
        for value in outside:
            with pytest.raises(InvalidRequestError, match=name):
                kind(**{name: value})


@pytest.mark.parametrize("kind", [Mirostat, MirostatV2, lambda: AdaptiveP(0.3)])
def test_clones_are_independent(kind: type) -> None:
    sampler = kind()
    sampler.accept(apply(HALVING, sampler).chosen)
    pending = apply(HALVING, sampler).chosen
    other = sampler.clone()
    assert other == sampler
    other.accept(pending)
    assert other != sampler
    sampler.accept(pending)
    assert other == sampler


def test_chain_without_a_drawing_sampler_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must draw a token, as Greedy and Draw do"):
        SamplerState(1).sample(np.zeros(3, np.float32), SamplerChain([TopK(1)]))


def test_samplers_after_the_draw_are_ignored() -> None:
    chain = SamplerChain([TopK(1), Draw(), TopK(-1), Draw()])
    assert SamplerState(1).sample(np.array([0, 1], np.float32), chain) == 1

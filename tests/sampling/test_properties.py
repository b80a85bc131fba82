"""Properties of samplers for all logits (Hypothesis)."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from candidates import EXTREME, LOGITS, Logits, apply, counts, distribution, draw, exact_softmax, start
from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling import (
    AdaptiveP,
    Draw,
    Dry,
    DynamicTemperature,
    Greedy,
    LogitBias,
    MinP,
    Mirostat,
    MirostatV2,
    Penalties,
    Sampler,
    SamplerChain,
    SamplerState,
    SuppressTokens,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
)
from suite import slow_but

SHARE = st.floats(0, 1)
FILTERS = st.one_of(
    st.builds(TopK, st.integers(-1, 45)),
    st.builds(TopP, SHARE),
    st.builds(MinP, SHARE),
    st.builds(TypicalP, SHARE),
    st.builds(TopNSigma, st.floats(-1, 4)),
    st.builds(Xtc, SHARE, SHARE),
)
SHAPERS = st.one_of(
    st.builds(Temperature, st.floats(0.01, 100)),
    st.builds(DynamicTemperature, st.floats(0, 5), st.floats(0, 5), st.floats(0, 3)),
    st.builds(Penalties, st.integers(-1, 20), st.floats(0.1, 10), st.floats(-2, 2), st.floats(-2, 2)),
    st.builds(Dry, st.floats(0, 5), st.floats(1, 3), st.integers(0, 4), st.integers(-1, 20)),
)
CHOOSERS = st.one_of(
    st.just(Greedy()),
    st.just(Draw()),
    st.builds(Mirostat, st.floats(0, 10), st.floats(0, 1)),
    st.builds(MirostatV2, st.floats(0, 10), st.floats(0, 1)),
    st.builds(AdaptiveP, st.floats(-1, 1), st.floats(0, 0.99)),
)
HISTORY = st.lists(st.integers(0, 5), max_size=25)


def history_of(tokens: list[int], logits: Logits) -> list[int]:
    return [token % len(logits) for token in tokens]


class TestAllSamplers:
    @given(st.one_of(LOGITS, EXTREME), st.lists(st.one_of(FILTERS, SHAPERS), max_size=5), HISTORY, st.integers(0, 99))
    def test_remaining_candidates_are_a_distribution(
        self, logits: Logits, samplers: list[Sampler], history: list[int], seed: int
    ) -> None:
        left = apply(logits, *samplers, history=history_of(history, logits), seed=seed)
        assert len(left) >= 1
        assert np.all(np.diff(left.ids) > 0)
        assert {*left.ids.tolist()} <= {*range(len(logits))}
        p = left.probabilities()
        assert np.all(p >= 0)
        assert math.fsum(p) == pytest.approx(1, abs=1e-12)
        impossible = np.flatnonzero(np.isneginf(logits))
        assert sum(distribution(left).get(token, 0) for token in impossible.tolist()) == 0

    @given(st.one_of(LOGITS, EXTREME), st.lists(st.one_of(FILTERS, SHAPERS), max_size=5), CHOOSERS, HISTORY)
    def test_equal_seeds_draw_equal_tokens(
        self, logits: Logits, samplers: list[Sampler], chooser: Sampler, history: list[int]
    ) -> None:
        chain = SamplerChain([*samplers, chooser])
        drawn = set()
        for _ in range(3):
            state = SamplerState(5)
            state.history.extend(history_of(history, logits))
            drawn.add(state.sample(logits.copy(), chain.clone()))
        (token,) = drawn
        assert logits[token] > -np.inf
        assert not np.isposinf(logits).any() or np.isposinf(logits[token])

    @given(LOGITS, st.integers(0, 39), st.one_of(FILTERS, SHAPERS), CHOOSERS)
    def test_nan_is_refused(self, logits: Logits, place: int, sampler: Sampler, chooser: Sampler) -> None:
        logits[place % len(logits)] = np.nan
        with pytest.raises(InvalidRequestError, match=f"largest logit is nan, of token {place % len(logits)}"):
            SamplerState(1).sample(logits, SamplerChain([sampler, chooser]))


class TestForbidden:
    @given(LOGITS, st.sets(st.integers(0, 39), min_size=1), st.booleans(), st.integers(0, 9), st.floats(0, 3))
    def test_suppressed_tokens_are_never_drawn(
        self, logits: Logits, tokens: set[int], by_bias: bool, seed: int, temp: float
    ) -> None:
        tokens = {token % len(logits) for token in tokens}
        assume(len(tokens) < len(logits))
        forbidding = {"logit_bias": dict.fromkeys(tokens, -math.inf)} if by_bias else {"suppress_tokens": list(tokens)}
        for _ in range(5):
            assert draw(logits, SamplingParams(temperature=temp, **forbidding), seed=seed) not in tokens

    @given(EXTREME, st.integers(0, 39))
    def test_suppressed_even_with_infinite_logits(self, logits: Logits, token: int) -> None:
        token %= len(logits)
        assume(logits[np.arange(len(logits)) != token].max(initial=-np.inf) > -np.inf)
        for sampler in (LogitBias({token: -math.inf}), SuppressTokens([token])):
            others = np.delete(logits, token)
            if np.isposinf(others).any() or not np.isposinf(logits[token]):
                assert distribution(apply(logits, sampler)).get(token, 0) == 0

    @given(LOGITS, st.integers(0, 39))
    def test_infinite_bias_forces_the_token(self, logits: Logits, token: int) -> None:
        token %= len(logits)
        assert distribution(apply(logits, LogitBias({token: math.inf}))) == {token: 1.0}

    @given(LOGITS, st.integers(0, 39), st.floats(-20, 20, width=32))
    def test_a_bias_adds(self, logits: Logits, token: int, bias: float) -> None:
        token %= len(logits)
        expected = logits.copy()
        expected[token] += np.float32(bias)
        np.testing.assert_array_equal(apply(logits, LogitBias({token: bias})).logits, expected)

    @pytest.mark.parametrize("sampler", [LogitBias({7: 1}), SuppressTokens([3, 7])])
    def test_unknown_token_is_refused(self, sampler: Sampler) -> None:
        with pytest.raises(InvalidRequestError, match="token 7 is not in the vocabulary of 4 tokens"):
            apply([0, 0, 0, 0], sampler)


class TestTruncation:
    @given(LOGITS, st.integers(-3, 45))
    def test_top_k_keeps_the_largest_and_ties(self, logits: Logits, k: int) -> None:
        least = sorted(logits, reverse=True)[min(k, len(logits)) - 1] if k > 0 else -np.inf
        assert apply(logits, TopK(k)).ids.tolist() == [i for i, value in enumerate(logits) if value >= least]

    @given(LOGITS, SHARE)
    def test_top_p_keeps_the_fewest_that_reach_p(self, logits: Logits, p: float) -> None:
        kept = apply(logits, TopP(p)).ids.tolist()
        exact = exact_softmax(logits)
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        n = len(kept)
        assert kept == sorted(order[:n]), "the most probable, the first of equals"
        slack = 1e-7  # sums are compared as float32
        if p < 1:
            assert n == 1 or exact[order[: n - 1]].sum() < p + slack, "one less would do"
            assert n == len(logits) or exact[order[:n]].sum() >= p - slack
        else:
            assert n == len(logits)

    def test_top_p_0_keeps_the_most_probable(self) -> None:
        assert apply([1, 2, 2], TopP(0)).ids.tolist() == [1]

    @given(LOGITS, SHARE)
    def test_min_p_is_a_share_of_the_largest(self, logits: Logits, p: float) -> None:
        kept = {*apply(logits, MinP(p)).ids.tolist()}
        exact = exact_softmax(logits)
        for i, probability in enumerate(exact):
            if probability > p * exact.max() * (1 + 1e-6):
                assert i in kept
            if probability < p * exact.max() * (1 - 1e-6):
                assert i not in kept

    @given(LOGITS, SHARE)
    def test_typical_p_keeps_surprisal_near_entropy(self, logits: Logits, p: float) -> None:
        kept = {*apply(logits, TypicalP(p)).ids.tolist()}
        exact = exact_softmax(logits)
        unlike = np.abs(-np.log(exact) + exact @ np.log(exact))
        dropped = {*range(len(logits))} - kept
        if p < 1:
            assert max(unlike[i] for i in kept) <= min((unlike[i] for i in dropped), default=np.inf) + 1e-5
            assert not dropped or sum(exact[i] for i in kept) >= p - 1e-6
        else:
            assert not dropped

    @given(LOGITS, st.floats(0.01, 5))
    def test_top_n_sigma_keeps_logits_near_the_largest(self, logits: Logits, n: float) -> None:
        kept = {*apply(logits, TopNSigma(n)).ids.tolist()}
        least = logits.max().astype(np.float64) - n * logits.std(dtype=np.float64)
        for i, logit in enumerate(logits.astype(np.float64)):
            if abs(logit - least) > 1e-5:
                assert (i in kept) == (logit > least)

    @given(LOGITS, st.floats(0.01, 0.5))
    def test_xtc_keeps_the_least_probable_top_choice(self, logits: Logits, threshold: float) -> None:
        kept = apply(logits, Xtc(1, threshold)).ids.tolist()
        exact = exact_softmax(logits)
        assume(np.abs(exact - threshold).min() > 1e-6)
        top = sorted(np.flatnonzero(exact >= threshold).tolist(), key=lambda i: (-logits[i], i))
        assert kept == sorted({*range(len(logits))} - {*top[:-1]})

    def test_xtc_applies_with_its_probability(self) -> None:
        state, chain = SamplerState(3), SamplerChain([Xtc(0.25, 0.1), Greedy()])
        drawn = [state.sample(np.array([1, 0.9], np.float32), chain) for _ in range(2000)]
        assert np.mean(drawn) == pytest.approx(0.25, abs=0.04)


class TestOrder:
    @given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=40), SHARE, st.integers(0, 5))
    def test_ties_keep_the_first(self, logits: list[float], p: float, seed: int) -> None:
        for sampler in (TopP(p), TypicalP(p)):
            kept = {*apply(logits, sampler).ids.tolist()}
            for value in {*logits}:
                places = [i for i, other in enumerate(logits) if other == value]
                among = [i in kept for i in places]
                assert among == sorted(among, reverse=True), "a later one was kept and an earlier one was not"

    @given(LOGITS)
    def test_falling_order(self, logits: Logits) -> None:
        assert start(logits).falling_order().tolist() == np.argsort(-logits, kind="stable").tolist()

    @given(LOGITS, st.permutations(range(8)))
    def test_draws_depend_on_the_candidates_only(self, logits: Logits, order: list[int]) -> None:
        samplers = [TopK(20), MinP(0.01), TopK(10), MinP(0.1), TopK(30), MinP(0.05), TopK(15), MinP(0)]
        chains = [SamplerChain([*samplers, Draw()]), SamplerChain([*(samplers[i] for i in order), Draw()])]
        assert len({tuple(SamplerState(7).sample(logits.copy(), chain) for _ in range(3)) for chain in chains}) == 1


COMMUTING = [
    (TopK(5), MinP(0.2)),
    (TopK(5), Temperature(0.5)),
    (TopNSigma(1.0), Temperature(2.0)),
    (SuppressTokens([0]), Penalties(10, 1.5, 0.5, 0.25)),
    (SuppressTokens([0]), Temperature(0.25)),
    (LogitBias({0: -math.inf}), Dry(1, 2, 1, 20)),
    (Penalties(10, 2.0), Temperature(4.0)),
]


class TestCommutation:
    @pytest.mark.parametrize(("one", "other"), COMMUTING, ids=repr)
    @given(logits=LOGITS, history=HISTORY)
    def test_commuting_samplers_are_exact(
        self, one: Sampler, other: Sampler, logits: Logits, history: list[int]
    ) -> None:
        assume(len(logits) > 1)
        logits = np.where(np.abs(logits) < 1e-30, np.float32(0), logits)  # halving denormals rounds them
        history = history_of(history, logits)
        ways = [apply(logits, *pair, history=history) for pair in ((one, other), (other, one))]
        assert ways[0].ids.tolist() == ways[1].ids.tolist()
        assert ways[0].logits.tolist() == ways[1].logits.tolist()

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (TopP(0.6), Temperature(2.0)),
            (MinP(0.4), Temperature(2.0)),
            (TopK(2), TopP(0.6)),
            (TopK(2), Penalties(4, 1, 0, 2)),
            (Penalties(4, 1, 0, 2), Temperature(2.0)),
        ],
        ids=repr,
    )
    def test_non_commuting_samplers(self, one: Sampler, other: Sampler) -> None:
        logits = np.log(np.array([0.4, 0.25, 0.2, 0.15], np.float32))
        ways = [distribution(apply(logits, *pair, history=[0])) for pair in ((one, other), (other, one))]
        assert ways[0] != ways[1]

    @given(LOGITS, st.one_of(st.builds(TopK, st.integers(0, 40)), st.builds(MinP, SHARE)))
    def test_truncation_is_idempotent(self, logits: Logits, sampler: Sampler) -> None:
        assert apply(logits, sampler, sampler).ids.tolist() == apply(logits, sampler).ids.tolist()


class TestPenalties:
    @given(LOGITS, HISTORY, st.floats(1, 5), st.floats(1, 2), st.floats(0, 2), st.floats(0, 2))
    def test_larger_penalties_never_raise_probabilities(
        self, logits: Logits, history: list[int], repeat: float, more: float, frequency: float, presence: float
    ) -> None:
        history = history_of(history, logits)
        without = apply(logits, history=history).logits
        less = apply(logits, Penalties(64, repeat, frequency, presence), history=history).logits
        least = apply(logits, Penalties(64, repeat * more, frequency * more, presence * more), history=history).logits
        assert np.all(without >= less)
        assert np.all(less >= least)
        untouched = [i for i in range(len(logits)) if i not in history]
        assert least[untouched].tolist() == logits[untouched].tolist()

    @given(LOGITS, st.integers(0, 5), st.integers(1, 5), st.floats(0.1, 2))
    def test_frequency_counts_occurrences_and_presence_once(
        self, logits: Logits, token: int, times: int, penalty: float
    ) -> None:
        token, penalty = token % len(logits), float(np.float32(penalty))
        by_count = apply(logits, Penalties(10, 1, penalty), history=[token] * times).logits[token]
        once = apply(logits, Penalties(10, 1, 0, penalty), history=[token] * times).logits[token]
        assert logits[token] - by_count == pytest.approx(times * penalty, rel=1e-4, abs=1e-4)
        assert logits[token] - once == pytest.approx(penalty, rel=1e-4, abs=1e-4)

    @given(HISTORY, st.floats(0.1, 3), st.floats(1, 2), st.integers(0, 4))
    def test_dry_penalises_longer_repetitions_more(
        self, history: list[int], multiplier: float, base: float, allowed: int
    ) -> None:
        logits = np.zeros(6, np.float32)
        got = apply(logits, Dry(multiplier, base, allowed, 64), history=history).logits
        for token in range(6):
            lengths = repetitions(history, token)
            penalised = len(history) > allowed and max(lengths, default=-1) >= allowed
            penalty = multiplier * base ** (max(lengths) - allowed) if penalised else 0
            assert -got[token] == pytest.approx(penalty, rel=1e-5)


def repetitions(history: list[int], token: int) -> list[int]:
    """Length of the repeated suffix before each earlier occurrence of a token."""

    def length(place: int) -> int:
        n = 0
        while n < place and history[place - 1 - n] == history[len(history) - 1 - n]:
            n += 1
        return n

    return [length(place) for place in range(1, len(history)) if history[place] == token]


class TestTemperature:
    @given(LOGITS, st.floats(0.1, 10))
    def test_divides(self, logits: Logits, temp: float) -> None:
        np.testing.assert_array_equal(apply(logits, Temperature(temp)).logits, logits / np.float32(temp))

    @given(LOGITS, st.floats(0.1, 5), st.floats(0.1, 1))
    def test_lower_temperature_sharpens(self, logits: Logits, temp: float, less: float) -> None:
        best = int(logits.argmax())
        warm, cool = (distribution(apply(logits, Temperature(t)))[best] for t in (temp, temp * less))
        assert cool >= warm - 1e-6

    def test_dynamic_temperature_spans_its_range(self) -> None:
        even, certain = np.zeros(8, np.float32), np.array([100] + [0] * 7, np.float32)
        assert apply(even + 1, DynamicTemperature(1, 0.5)).logits[0] == pytest.approx(1 / 1.5)
        assert apply(certain, DynamicTemperature(1, 0.5)).logits[0] == pytest.approx(100 / 0.5)

    def test_dynamic_temperature_follows_the_entropy(self) -> None:
        logits = np.log(np.array([0.7, 0.1, 0.1, 0.1], np.float32))
        entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1)) / math.log(4)
        for exponent in (0.5, 1, 2):
            temp = 0.5 + 1.0 * entropy**exponent
            assert apply(logits, DynamicTemperature(1, 0.5, exponent)).logits == pytest.approx(logits / temp, rel=1e-5)


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square statistic in standard deviations, with rare tokens pooled."""
    expected = probabilities * observed.sum()
    rare = expected < 5
    o = np.append(observed[~rare], observed[rare].sum())
    e = np.append(expected[~rare], expected[rare].sum())
    o, e = o[e > 0], e[e > 0]
    freedom = len(e) - 1
    return (((o - e) ** 2 / e).sum() - freedom) / math.sqrt(2 * freedom)


class TestDraws:
    # Under the hypothesis that draws are as they should be, chi-square is this far off once in 10^4 to 10^5 seeds.
    FAR = 5.0

    @pytest.mark.parametrize("seed", slow_but([1], [1, 2, 3]))
    @pytest.mark.parametrize("n_vocab", [2, 7, 100])
    def test_frequencies_match_probabilities(self, seed: int, n_vocab: int) -> None:
        logits = np.linspace(-1.5, 1.5, n_vocab, dtype=np.float32)
        observed = counts(logits, SamplingParams(temperature=1), 20000, seed)
        assert abs(chi_square(observed, exact_softmax(logits))) < self.FAR
        assert chi_square(observed, exact_softmax(logits * np.float32(1.2))) > self.FAR

    @pytest.mark.medium
    def test_frequencies_match_after_the_chain(self) -> None:
        params = SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.05)
        logits = np.random.default_rng(4).normal(0, 1.5, 50).astype(np.float32)
        left = distribution(apply(logits, Temperature(0.7), TopK(12), TopP(0.9), MinP(0.05)))
        expected = np.array([left.get(i, 0) for i in range(50)])
        observed = counts(logits, params, 20000, 5)
        assert observed[expected == 0].sum() == 0
        assert abs(chi_square(observed, expected)) < self.FAR

    @pytest.mark.medium
    def test_adaptive_p_frequencies_match(self) -> None:
        p = np.array([0.5, 0.3, 0.15, 0.05])
        aimed = 5 - 10 * (d := np.abs(p - 0.3) / 0.3) ** 2 / (1 + d)
        observed = counts(np.log(p), SamplingParams(temperature=1, adaptive_target=0.3), 20000, 6)
        assert abs(chi_square(observed, exact_softmax(aimed))) < self.FAR

    @pytest.mark.parametrize("n_vocab", [1, 3])
    def test_one_random_number_per_token(self, n_vocab: int) -> None:
        one, other = (np.random.default_rng(9) for _ in range(2))
        candidates = start(np.arange(n_vocab))
        candidates.random = one
        for _ in range(5):
            candidates.draw()
        assert one.random() == other.random(6)[5]

    @pytest.mark.parametrize("share", [0.0, np.nextafter(1.0, 0.0)])
    def test_ends_of_the_random_range(self, share: float) -> None:
        candidates = start([-np.inf, 0, 1, -np.inf])
        candidates.random = type("Fixed", (), {"random": lambda self: share})()
        assert candidates.draw() == (1 if share == 0 else 2)

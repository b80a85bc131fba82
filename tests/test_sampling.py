import math
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling.sampler import Sampler, apply_penalty, kept_by_top_k, kept_by_top_p, softmax

Logits = np.ndarray

finite = st.floats(-30, 30, width=32)
logits_of = hnp.arrays(np.float32, st.integers(1, 40), elements=finite)
few_values = hnp.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-2.0, 0.0, 0.5, 3.0]))
either = st.one_of(logits_of, few_values)


def draw(logits: Logits, params: SamplingParams, *, recent: tuple[int, ...] = (), seed: int = 1) -> int:
    return Sampler(seed).sample(logits.copy(), recent, params)


def frequencies(logits: list[float], params: SamplingParams, n: int = 4000) -> np.ndarray:
    sampler = Sampler(1234)
    drawn = [sampler.sample(np.array(logits, np.float32), [], params) for _ in range(n)]
    return np.bincount(drawn, minlength=len(logits)) / n


class TestGreedy:
    @given(either)
    def test_defaults_are_argmax_the_first_of_equals(self, logits: Logits) -> None:
        expected = min(range(len(logits)), key=lambda i: (-logits[i], i))
        assert draw(logits, SamplingParams()) == expected

    @pytest.mark.parametrize("temp", [0, -1, -0.5])
    def test_no_temperature_is_greedy_whatever_else_is_asked(self, temp: float) -> None:
        logits = np.array([1, 3, 3, 2], np.float32)
        assert draw(logits, SamplingParams(temp=temp, top_k=1, top_p=0.1, min_p=0.9)) == 1

    def test_greedy_changes_nothing(self) -> None:
        logits = np.array([1, 3, 2], np.float32)
        Sampler(1).sample(logits, [1], SamplingParams())
        assert logits.tolist() == [1, 3, 2]

    @pytest.mark.parametrize("temp", [1e-37, 1e-44, 1e-60, 1e-300])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_temperature_near_0_is_greedy(self, temp: float, sign: int) -> None:
        logits = sign * np.array([40, 50, 45, 50], np.float32)
        assert {draw(logits, SamplingParams(temp=temp), seed=seed) for seed in range(20)} == {int(logits.argmax())}


class TestRefusals:
    @pytest.mark.parametrize("temp", [0.0, 0.8])
    def test_not_a_number(self, temp: float) -> None:
        logits = np.array([1, np.nan, 2], np.float32)
        with pytest.raises(InvalidRequestError, match="largest logit is nan, of token 1"):
            draw(logits, SamplingParams(temp=temp))

    def test_nothing_is_possible(self) -> None:
        with pytest.raises(InvalidRequestError, match="largest logit is -inf"):
            draw(np.full(4, -np.inf, np.float32), SamplingParams(temp=1))

    @pytest.mark.parametrize("name", ["temp", "top_p", "min_p", "penalty"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True])
    def test_numbers_are_finite(self, name: str, value: object) -> None:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})

    def test_numpy_numbers_will_do(self) -> None:
        numpys = SamplingParams(
            temp=np.float32(0.5), top_p=np.float64(0.9), top_k=np.int8(40), penalty_last_n=np.uint8(64)
        )
        assert numpys == SamplingParams(temp=0.5, top_p=0.9, top_k=40, penalty_last_n=64)
        assert {type(value) for value in attrs.astuple(numpys)} == {int, float}

    @pytest.mark.parametrize(("name", "value"), [("top_p", -0.1), ("top_p", 1.1), ("min_p", -1), ("min_p", 2)])
    def test_shares_are_from_0_to_1(self, name: str, value: float) -> None:
        with pytest.raises(InvalidRequestError, match=f"{name} = .* is not a number from 0 to 1"):
            SamplingParams(**{name: value})

    @pytest.mark.parametrize("name", ["top_k", "penalty_last_n"])
    @pytest.mark.parametrize("value", [1.0, "1", None, False])
    def test_counts_are_whole(self, name: str, value: object) -> None:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})


class TestPenalty:
    @given(either, st.lists(st.integers(0, 1000), max_size=60), st.floats(0.1, 10), st.integers(-2, 70))
    def test_divides_or_multiplies_once_a_token(
        self, logits: Logits, recent: list[int], penalty: float, last_n: int
    ) -> None:
        recent = [token % len(logits) for token in recent]
        window = set(recent[-last_n:]) if last_n > 0 else set()
        factor = np.float32(penalty)
        expected = [
            value if i not in window else value / factor if value > 0 else value * factor
            for i, value in enumerate(logits)
        ]
        apply_penalty(logits, recent, SamplingParams(penalty=penalty, penalty_last_n=last_n))
        np.testing.assert_array_equal(logits, np.array(expected, np.float32))

    @pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5])
    def test_off(self, penalty: float) -> None:
        logits = np.array([1, -1], np.float32)
        apply_penalty(logits, [0, 1], SamplingParams(penalty=penalty))
        assert logits.tolist() == [1, -1]

    def test_comes_before_the_choice(self) -> None:
        assert draw(np.array([3, 2], np.float32), SamplingParams(penalty=2), recent=(0,)) == 1

    def test_changes_the_logits_in_place_as_temperature_does(self) -> None:
        logits = np.array([4, -1, 2], np.float32)
        Sampler(1).sample(logits, [0, 1], SamplingParams(penalty=2, temp=0.5))
        assert logits.tolist() == [4, -4, 4]


class TestTopK:
    @given(either, st.integers(-3, 45))
    def test_keeps_the_largest_and_what_ties_with_the_last(self, logits: Logits, k: int) -> None:
        kept = kept_by_top_k(logits, k).tolist()
        least = sorted(logits, reverse=True)[min(k, len(logits)) - 1] if k > 0 else -np.inf
        assert kept == [i for i, value in enumerate(logits) if value >= least]

    def test_ties_with_the_kth_can_all_be_drawn(self) -> None:
        shares = frequencies([2, 1, 1, 0], SamplingParams(temp=1, top_k=2))
        assert shares[3] == 0
        assert shares[1] == pytest.approx(shares[2], abs=0.05)
        assert shares[1] > 0.1


class TestTopP:
    @given(either, st.floats(0, 1))
    def test_keeps_the_fewest_that_reach_p(self, logits: Logits, p: float) -> None:
        probabilities = softmax(logits)
        kept = kept_by_top_p(probabilities, p)
        order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
        n = int(kept.sum())
        assert n >= 1
        assert sorted(order[:n]) == np.flatnonzero(kept).tolist(), "the most probable, the first of equals"
        slack = 1e-9
        if p < 1:
            assert n == 1 or probabilities[order[: n - 1]].sum() < p + slack, "one less would do"
            assert n == len(logits) or probabilities[order[:n]].sum() >= p - slack
        else:
            assert n == len(logits)

    def test_0_leaves_the_most_probable_alone(self) -> None:
        assert draw(np.array([1, 2, 2], np.float32), SamplingParams(temp=1, top_p=0)) == 1


class TestMinP:
    @given(either, st.floats(0, 1), st.integers(0, 100))
    def test_only_what_is_probable_enough_is_drawn(self, logits: Logits, min_p: float, seed: int) -> None:
        drawn = draw(logits, SamplingParams(temp=1, min_p=min_p), seed=seed)
        probabilities = softmax(logits)
        assert probabilities[drawn] >= min_p * probabilities.max()

    def test_is_a_share_of_the_largest(self) -> None:
        shares = frequencies(np.log([0.6, 0.3, 0.1]).tolist(), SamplingParams(temp=1, min_p=0.4))
        assert shares == pytest.approx([2 / 3, 1 / 3, 0], abs=0.03)


class TestDraw:
    @given(either)
    def test_softmax(self, logits: Logits) -> None:
        probabilities = softmax(logits)
        exact = [math.exp(float(x) - float(logits.max())) for x in logits]
        np.testing.assert_allclose(probabilities, np.array(exact) / math.fsum(exact), rtol=1e-12)

    def test_certain_logits(self) -> None:
        assert softmax(np.array([np.inf, 0, np.inf], np.float32)).tolist() == [0.5, 0, 0.5]
        assert draw(np.array([-np.inf, 0, -np.inf], np.float32), SamplingParams(temp=1)) == 1

    @given(either, st.floats(0.05, 5), st.integers(-1, 45), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
    def test_a_token_that_passes_every_filter(
        self, logits: Logits, temp: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> None:
        params = SamplingParams(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p)
        drawn = draw(logits, params, seed=seed)
        assert drawn == draw(logits, params, seed=seed)
        scaled = logits / np.float32(temp)
        ids = kept_by_top_k(scaled, top_k)
        probabilities = softmax(scaled[ids])
        kept = kept_by_top_p(probabilities, top_p) & (probabilities >= min_p * probabilities.max())
        assert drawn in ids[kept]

    def test_tokens_come_as_often_as_they_are_probable(self) -> None:
        probabilities = np.array([0.5, 0.25, 0.15, 0.1])
        assert frequencies(np.log(probabilities).tolist(), SamplingParams(temp=1)) == pytest.approx(
            probabilities, abs=0.03
        )

    def test_temperature_flattens(self) -> None:
        logits = [2.0, 0.0]
        shares = [frequencies(logits, SamplingParams(temp=temp))[0] for temp in (0.5, 1, 4)]
        assert shares == pytest.approx([1 / (1 + math.exp(-2 / temp)) for temp in (0.5, 1, 4)], abs=0.03)

    def test_impossible_tokens_are_never_drawn(self) -> None:
        shares = frequencies([-np.inf, 0, -np.inf, 0, -np.inf], SamplingParams(temp=1))
        assert shares[[0, 2, 4]].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("share", [0.0, np.nextafter(1.0, 0.0)])
    def test_nor_at_the_ends_of_the_random_range(self, share: float) -> None:
        sampler = Sampler(1)
        sampler._random = SimpleNamespace(random=lambda: share)
        logits = np.array([-np.inf, 0, 1, -np.inf], np.float32)
        assert sampler.sample(logits, [], SamplingParams(temp=1)) == (1 if share == 0 else 2)

    def test_filters_apply_in_order(self) -> None:
        # top_k leaves two tokens; of these alone, renormalised, the first one already reaches top_p.
        logits = np.log([0.4, 0.25, 0.2, 0.15]).tolist()
        assert frequencies(logits, SamplingParams(temp=1, top_k=2, top_p=0.6)).tolist() == [1, 0, 0, 0]
        assert frequencies(logits, SamplingParams(temp=1, top_p=0.6))[1] > 0.3

"""Default chain of `SamplingParams`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candidates import LOGITS, Logits, apply, counts, draw
from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling import (
    AdaptiveP,
    Draw,
    Greedy,
    LogitBias,
    MinP,
    Mirostat,
    MirostatV2,
    Penalties,
    SamplerState,
    SuppressTokens,
    Temperature,
    TopK,
    TopP,
    build_chain,
)


def frequencies(logits: list[float], params: SamplingParams) -> np.ndarray:
    return counts(logits, params) / 4000


class TestGreedy:
    @given(LOGITS)
    def test_defaults_are_argmax_with_the_first_of_equals(self, logits: Logits) -> None:
        expected = min(range(len(logits)), key=lambda i: (-logits[i], i))
        assert draw(logits, SamplingParams()) == expected

    @pytest.mark.parametrize("temp", [0, -1, -0.5])
    def test_temperature_0_is_greedy_with_all_other_parameters(self, temp: float) -> None:
        logits = np.array([1, 3, 3, 2], np.float32)
        others = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "xtc_probability": 1.0, "mirostat": 2}
        assert draw(logits, SamplingParams(temperature=temp, **others)) == 1
        assert draw(logits, SamplingParams(temperature=temp, adaptive_target=0.1, dynatemp_range=3)) == 1

    def test_greedy_leaves_logits_unchanged(self) -> None:
        logits = np.array([1, 3, 2], np.float32)
        state = SamplerState(1)
        state.accept(1)
        state.sample(logits, SamplingParams())
        assert logits.tolist() == [1, 3, 2]

    @pytest.mark.parametrize("temp", [1e-37, 1e-44, 1e-60, 1e-300])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_temperature_near_0_is_greedy(self, temp: float, sign: int) -> None:
        logits = sign * np.array([40, 50, 45, 50], np.float32)
        assert {draw(logits, SamplingParams(temperature=temp), seed=seed) for seed in range(20)} == {
            int(logits.argmax())
        }


class TestErrors:
    @pytest.mark.parametrize("temp", [0.0, 0.8])
    def test_nan_logits(self, temp: float) -> None:
        logits = np.array([1, np.nan, 2], np.float32)
        with pytest.raises(InvalidRequestError, match="largest logit is nan, of token 1"):
            draw(logits, SamplingParams(temperature=temp))

    def test_all_logits_minus_infinity(self) -> None:
        with pytest.raises(InvalidRequestError, match="largest logit is -inf"):
            draw(np.full(4, -np.inf, np.float32), SamplingParams(temperature=1))

    def test_all_tokens_suppressed(self) -> None:
        with pytest.raises(InvalidRequestError, match="largest logit is -inf"):
            draw(np.zeros(2, np.float32), SamplingParams(suppress_tokens=[0, 1]))

    @pytest.mark.parametrize(
        "logits",
        [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(0, np.float32), np.zeros(8, np.float32)[::2]],
        ids=["float64", "matrix", "empty", "strided"],
    )
    def test_wrong_shape_or_dtype(self, logits: np.ndarray) -> None:
        with pytest.raises(InvalidRequestError, match="contiguous, writable float32 array"):
            SamplerState(1).sample(logits, SamplingParams())


class TestPenalty:
    @given(LOGITS, st.lists(st.integers(0, 1000), max_size=60), st.floats(0.1, 10), st.integers(-2, 70))
    def test_divides_or_multiplies_once_per_token(
        self, logits: Logits, recent: list[int], penalty: float, last_n: int
    ) -> None:
        recent = [token % len(logits) for token in recent]
        window = set(recent[-last_n:]) if last_n > 0 else set()
        factor = np.float32(penalty)
        expected = [
            value if i not in window else value / factor if value > 0 else value * factor
            for i, value in enumerate(logits)
        ]
        penalised = apply(logits, Penalties(last_n, penalty), history=recent)
        np.testing.assert_array_equal(penalised.logits, np.array(expected, np.float32))

    @pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5])
    def test_off(self, penalty: float) -> None:
        assert build_chain(SamplingParams(repeat_penalty=penalty)).samplers == (Greedy(),)
        assert apply([1, -1], Penalties(64, penalty), history=[0, 1]).logits.tolist() == [1, -1]

    def test_applies_before_the_draw(self) -> None:
        assert draw(np.array([3, 2], np.float32), SamplingParams(repeat_penalty=2), history=(0,)) == 1

    def test_changes_the_logits_in_place_as_temperature_does(self) -> None:
        logits, state = np.array([4, -1, 2], np.float32), SamplerState(1)
        state.accept(0)
        state.accept(1)
        state.sample(logits, SamplingParams(repeat_penalty=2, temperature=0.5))
        assert logits.tolist() == [4, -4, 4]


class TestDraw:
    @given(LOGITS, st.floats(0.05, 5), st.integers(-1, 45), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
    def test_drawn_token_passes_every_filter(
        self, logits: Logits, temp: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> None:
        params = SamplingParams(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p)
        drawn = draw(logits, params, seed=seed)
        assert drawn == draw(logits, params, seed=seed)
        assert drawn in apply(logits, Temperature(temp), TopK(top_k), TopP(top_p), MinP(min_p)).ids

    def test_frequencies_match_probabilities(self) -> None:
        probabilities = np.array([0.5, 0.25, 0.15, 0.1])
        assert frequencies(np.log(probabilities).tolist(), SamplingParams(temperature=1)) == pytest.approx(
            probabilities, abs=0.03
        )

    def test_temperature_flattens(self) -> None:
        logits = [2.0, 0.0]
        shares = [frequencies(logits, SamplingParams(temperature=temp))[0] for temp in (0.5, 1, 4)]
        assert shares == pytest.approx([1 / (1 + np.exp(-2 / temp)) for temp in (0.5, 1, 4)], abs=0.03)

    def test_ties_with_the_kth_can_all_be_drawn(self) -> None:
        shares = frequencies([2, 1, 1, 0], SamplingParams(temperature=1, top_k=2))
        assert shares[3] == 0
        assert shares[1] == pytest.approx(shares[2], abs=0.05)
        assert shares[1] > 0.1

    def test_min_p_is_a_share_of_the_largest(self) -> None:
        shares = frequencies(np.log([0.6, 0.3, 0.1]).tolist(), SamplingParams(temperature=1, min_p=0.4))
        assert shares == pytest.approx([2 / 3, 1 / 3, 0], abs=0.03)

    def test_filters_apply_in_order(self) -> None:
        # top_k leaves two tokens; of these alone, renormalised, the first one already reaches top_p.
        logits = np.log([0.4, 0.25, 0.2, 0.15]).tolist()
        assert frequencies(logits, SamplingParams(temperature=1, top_k=2, top_p=0.6)).tolist() == [1, 0, 0, 0]
        assert frequencies(logits, SamplingParams(temperature=1, top_p=0.6))[1] > 0.3


class TestChain:
    def test_the_default_order_puts_temperature_first(self) -> None:
        chain = build_chain(
            SamplingParams(
                temperature=0.5,
                top_k=7,
                top_p=0.9,
                min_p=0.1,
                repeat_penalty=1.1,
                logit_bias={3: 1},
                suppress_tokens=[4],
            )
        )
        assert chain.samplers == (
            SuppressTokens([4]),
            LogitBias({3: 1}),
            Penalties(64, 1.1),
            Temperature(0.5),
            TopK(7),
            TopP(0.9),
            MinP(0.1),
            Draw(),
        )

    @pytest.mark.parametrize(
        "names", [("top_p", "temperature", "top_k"), ("nucleus", "Temp", "top-k"), ("topp", "temp", "TOPK")]
    )
    def test_custom_order(self, names: tuple[str, ...]) -> None:
        params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, samplers=names)
        assert build_chain(params).samplers == (TopP(0.9), Temperature(0.5), TopK(7), Draw())

    def test_forbidding_samplers_can_be_reordered(self) -> None:
        params = SamplingParams(temperature=0.5, logit_bias={3: 1}, samplers=("temperature", "logit_bias"))
        assert build_chain(params).samplers == (Temperature(0.5), LogitBias({3: 1}), Draw())

    def test_last_sampler_by_parameters(self) -> None:
        others = {"temperature": 0.5, "top_k": 7, "repeat_penalty": 2}
        kinds = [Mirostat(4, 0.2), MirostatV2(4, 0.2)]
        for version, kind in enumerate(kinds, start=1):
            params = SamplingParams(mirostat=version, mirostat_tau=4, mirostat_eta=0.2, **others)
            assert build_chain(params).samplers == (Temperature(0.5), kind)
        params = SamplingParams(adaptive_target=0.3, adaptive_decay=0.8, **others)
        assert build_chain(params).samplers[-1] == AdaptiveP(0.3, 0.8)

    def test_unknown_sampler_name(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"unknown sampler 'top_q' \(built in: .*penalties, dry"):
            build_chain(SamplingParams(temperature=1, samplers=("top_q",)))

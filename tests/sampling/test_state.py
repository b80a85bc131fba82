"""Sampler state: seeds, history, clones, log-probabilities."""

import math

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candidates import EXTREME, LOGITS, Logits, exact_softmax
from llamacli import InvalidRequestError, SamplingParams
from llamacli.sampling import (
    Candidates,
    Draw,
    LogProbs,
    MirostatV2,
    Penalties,
    SamplerChain,
    SamplerState,
    SuppressTokens,
    Temperature,
    TopK,
)

PARAMS = [
    SamplingParams(),
    SamplingParams(
        temperature=1.0, top_k=5, xtc_probability=0.5, xtc_threshold=0.1, repeat_penalty=1.2, frequency_penalty=0.3
    ),
    SamplingParams(temperature=1.0, mirostat=1, mirostat_eta=0.5),
    SamplingParams(temperature=1.0, mirostat=2, mirostat_eta=0.5),
    SamplingParams(temperature=1.0, adaptive_target=0.3),
    SamplingParams(temperature=1.0, dry_multiplier=2.0, dry_allowed_length=0),
]
VOCABULARY = np.random.default_rng(0).normal(0, 1, 30).astype(np.float32)


def write(state: SamplerState, params: SamplingParams | SamplerChain, n: int = 20) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(state.sample(VOCABULARY.copy(), params))
        state.accept(tokens[-1])
    return tokens


@pytest.mark.parametrize("params", PARAMS, ids=repr)
class TestStreams:
    def test_equal_seeds_give_equal_texts(self, params: SamplingParams) -> None:
        texts = [write(SamplerState(seed), params) for seed in (1, 1, 2)]
        assert texts[0] == texts[1]
        assert (texts[0] != texts[2]) == (params.temperature > 0)

    def test_a_seed_can_be_set_again(self, params: SamplingParams) -> None:
        state = SamplerState(5)
        first = write(state, params)
        state.set_seed(5)
        state.reset()
        assert write(state, params) == first

    def test_clones_draw_the_same_and_are_independent(self, params: SamplingParams) -> None:
        state, twin = SamplerState(3), SamplerState(3)
        assert write(state, params) == write(twin, params)
        clone = state.clone()
        expected = write(twin, params)
        assert write(clone, params) == expected
        assert write(state, params) == expected

    def test_equal_parameters_keep_the_samplers_state(self, params: SamplingParams) -> None:
        one, other = SamplerState(4), SamplerState(4)
        for _ in range(3):
            same = SamplingParams(
                **{name: getattr(params, name) for name in ("temperature", "mirostat", "adaptive_target")}
            )
            again = SamplingParams(
                **{name: getattr(params, name) for name in ("temperature", "mirostat", "adaptive_target")}
            )
            assert same is not again
            assert write(one, same, 3) == write(other, again, 3)


def test_history_is_kept_when_parameters_change() -> None:
    state = SamplerState(1)
    (first,) = write(state, SamplingParams(), 1)
    assert state.sample(VOCABULARY.copy(), SamplingParams(presence_penalty=100)) != first
    state.reset()
    assert state.sample(VOCABULARY.copy(), SamplingParams(presence_penalty=100)) == first


def test_clones_copy_custom_chains() -> None:
    chain = SamplerChain([Penalties(4, 1.5), Temperature(0.9), Draw()])
    state = SamplerState(1)
    write(state, chain)
    clone = state.clone()
    assert write(clone, chain) == write(state, chain)


def test_states_do_not_share_a_chain() -> None:
    chain = SamplerChain([MirostatV2(tau=1.0, eta=0.5)])
    one, other, alone = SamplerState(1), SamplerState(2), SamplerState(1)
    texts = [[], []]
    for _ in range(20):
        for state, text in zip((one, other), texts, strict=True):
            text += write(state, chain, 1)
    assert texts[0] == write(alone, SamplerChain([MirostatV2(tau=1.0, eta=0.5)]))


class Counting(SamplerChain):
    """Custom chain that counts its draws."""

    n_drawn = 0

    def apply(self, candidates: Candidates) -> None:
        super().apply(candidates)
        self.n_drawn += 1


def test_derived_chains_keep_their_class() -> None:
    state, chain = SamplerState(1), Counting([TopK(3), Draw()], n_probs=2)
    write(state, chain, 5)
    assert (type(state._chain), state._chain.n_drawn, chain.n_drawn) == (Counting, 5, 0)
    assert state.logprobs is not None
    assert write(state.clone(), chain) == write(state, chain)


@pytest.mark.parametrize("params", [None, {"temperature": 1.0}, Draw(), "greedy"])
def test_invalid_parameters_are_refused(params: object) -> None:
    for act in (SamplerState(1).sample, SamplerState(1).legal):
        with pytest.raises(InvalidRequestError, match="sampling needs SamplingParams or a SamplerChain, not"):
            act(VOCABULARY.copy(), params)


def test_candidates_are_valid_until_the_next_draw() -> None:
    state, params = SamplerState(1), SamplerChain([Temperature(0.5), TopK(3), Draw()])
    with pytest.raises(InvalidRequestError, match="no token has been drawn yet"):
        _ = state.candidates
    token = state.sample(VOCABULARY.copy(), params)
    assert state.candidates.chosen == token
    assert state.candidates.ids.tolist() == sorted(np.argsort(-VOCABULARY)[:3].tolist())
    expected = exact_softmax(VOCABULARY[state.candidates.ids] * 2)
    np.testing.assert_allclose(state.candidates.probabilities(), expected, rtol=1e-6)
    for index, p in enumerate(expected):
        assert state.candidates.surprisal(index) == pytest.approx(-math.log(p), rel=1e-6)


def test_legal_tokens_without_drawing() -> None:
    logits = VOCABULARY.copy()
    logits[[4, 5]] = -np.inf
    state, twin = SamplerState(1), SamplerState(1)
    assert state.legal(logits, SamplingParams()).ids.tolist() == [i for i in range(30) if i not in (4, 5)]
    nested = SamplerChain([SamplerChain([TopK(2), SuppressTokens([1, 2])]), Draw()])
    legal = state.legal(logits, nested)
    assert legal.ids.tolist() == [i for i in range(30) if i not in (1, 2, 4, 5)]
    np.testing.assert_array_equal(legal.logits, VOCABULARY[legal.ids])
    assert write(state, nested) == write(twin, nested), "looking changes nothing"
    with pytest.raises(InvalidRequestError, match="cannot sample"):
        state.legal(logits, SamplerChain([SuppressTokens(range(30)), Draw()]))


def test_chains_nest() -> None:
    flat = SamplerChain([Penalties(4, 1.5), Temperature(0.9), Draw()])
    nested = SamplerChain([SamplerChain([Penalties(4, 1.5), Temperature(0.9)]), SamplerChain([Draw()])])
    assert write(SamplerState(1), flat) == write(SamplerState(1), nested)
    assert repr(nested).startswith("SamplerChain([SamplerChain([Penalties(last_n=4, ")


class TestLogProbs:
    @given(LOGITS, st.integers(1, 50), st.floats(0, 2))
    def test_use_the_unmodified_logits(self, logits: Logits, n: int, temp: float) -> None:
        state = SamplerState(1)
        state.accept(0)
        chosen = state.sample(logits.copy(), SamplingParams(temperature=temp, top_k=3, repeat_penalty=1.5, n_probs=n))
        exact = np.log(exact_softmax(logits))
        assert state.logprobs.chosen == pytest.approx(exact[chosen], abs=1e-9)
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n]
        assert [token for token, _ in state.logprobs.top] == order
        assert [value for _, value in state.logprobs.top] == pytest.approx(exact[order], abs=1e-9)

    @given(EXTREME)
    def test_of_extreme_logits(self, logits: Logits) -> None:
        state = SamplerState(1)
        state.sample(logits.copy(), SamplingParams(n_probs=len(logits)))
        total = math.fsum(math.exp(value) for _, value in state.logprobs.top)
        assert total == pytest.approx(1, abs=1e-12)
        assert state.logprobs.chosen == state.logprobs.top[0][1] <= 0

    @given(LOGITS, st.integers(1, 50))
    def test_post_sampling_are_those_of_the_draw(self, logits: Logits, n: int) -> None:
        params = SamplingParams(temperature=0.5, top_k=3, n_probs=n, post_sampling_probs=True)
        state = SamplerState(1)
        chosen = state.sample(logits.copy(), params)
        kept = np.flatnonzero(logits >= np.sort(logits)[-3:][0])  # and all that equal the third
        exact = exact_softmax((logits[kept] / np.float32(0.5)).astype(np.float32))
        expected = dict(zip(kept.tolist(), exact.tolist(), strict=True))
        assert math.exp(state.logprobs.chosen) == pytest.approx(expected[chosen], abs=1e-6)
        found = [math.exp(value) for _, value in state.logprobs.top]
        assert {token for token, _ in state.logprobs.top} <= expected.keys()
        assert found == pytest.approx(sorted((p for p in exact if p > 0), reverse=True)[:n], abs=1e-6)
        state.sample(logits.copy(), attrs.evolve(params, temperature=0.0))
        best = int(logits.argmax())
        assert state.logprobs == LogProbs(0.0, ((best, 0.0),))

    def test_only_computed_on_request(self) -> None:
        state = SamplerState(1)
        state.sample(VOCABULARY.copy(), SamplingParams(n_probs=1))
        assert state.logprobs is not None
        state.sample(VOCABULARY.copy(), SamplingParams())
        assert state.logprobs is None
        state.sample(VOCABULARY.copy(), SamplerChain([Draw()], n_probs=2))
        assert len(state.logprobs.top) == 2

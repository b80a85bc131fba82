"""DRY sequence breakers, and tokens suppressed by the vocabulary."""

import numpy as np
import pytest

from candidates import apply
from llamacli import SamplingParams
from llamacli.sampling import Candidates, Dry, Penalties, SamplerState, SuppressTokens, build_chain, sequence_breakers
from llamacli.testing.vocabularies import byte_level
from llamacli.tokenizer import tokenizer_from_metadata

MERGES = ["a b", "ab c", "b c", ": :"]
TOKENS = tokenizer_from_metadata(byte_level(MERGES, suppress_tokens=np.array([7, 9], np.int32)))
A, B, C, COLON = b"abc:"
AB, ABC, BC, COLONS = range(256, 260)


class TestBreakers:
    def test_single_character_matches_every_token_with_it(self) -> None:
        assert sequence_breakers(TOKENS, (":",)) == {COLON: ((),), COLONS: ((),)}

    def test_breaker_can_begin_at_a_token_end(self) -> None:
        # "bcd" is within no token; it begins at the end of those in b and bc, and the rest follows.
        d = ord("d")
        assert sequence_breakers(TOKENS, ("bcd",)) == {B: ((C, d),), AB: ((C, d),), BC: ((d,),), ABC: ((d,),)}

    def test_breaker_within_a_token(self) -> None:
        assert sequence_breakers(TOKENS, ("bc",)) == {B: ((C,),), AB: ((C,),), BC: ((),), ABC: ((),)}

    def test_several_or_empty_breakers(self) -> None:
        assert sequence_breakers(TOKENS, ("c", ":")).keys() == {C, BC, ABC, COLON, COLONS}
        assert sequence_breakers(TOKENS, ("",)) == sequence_breakers(TOKENS, ()) == {}

    def test_long_breakers_are_truncated(self) -> None:
        (rests,) = sequence_breakers(TOKENS, ("x" * 100,)).values()
        assert {len(rest) for rest in rests} == {20}, "39 bytes would follow the first, in as many tokens"


def test_frequency_and_presence() -> None:
    candidates = Candidates(np.random.default_rng(0), [1, 1, 2])
    candidates.start(np.zeros(4, np.float32))
    Penalties(64, 1.0, 0.5, 0.25).apply(candidates)
    assert candidates.logits.tolist() == [0, -1.25, -0.75, 0]


@pytest.mark.parametrize(("repeat", "expected"), [(0.5, [4, -1]), (1.0, [2, -2]), (2.0, [1, -4]), (0.0, [2, -2])])
def test_repetition(repeat: float, expected: list[float]) -> None:
    assert apply(np.array([2.0, -2.0]), Penalties(3, repeat), history=[0, 1]).logits.tolist() == expected


def test_penalties_of_no_tokens_change_nothing() -> None:
    for sampler in (Penalties(0, 2.0, 0.5, 0.25), Dry(1, 2, 1, 0)):
        assert apply(np.array([2.0, -2.0]), sampler, history=[0, 1, 0, 1]).logits.tolist() == [2, -2]


class TestDry:
    def penalty(self, history: list[int], token: int, breakers: tuple[str, ...]) -> float:
        dry = Dry(1, 2, 1, 64, sequence_breakers(TOKENS, breakers))
        return -float(apply(np.zeros(TOKENS.n_vocab), dry, history=history).logits[token])

    def test_no_repetition_reaches_across_a_breaker(self) -> None:
        x, y = b"xy"
        text = [x, y, COLON, A, C, x, y, COLON, A]
        assert self.penalty(text, C, ()) == 2**3
        assert self.penalty(text, C, (":",)) == 2**0
        assert self.penalty(text, C, (":a",)) == 0, "nothing stands after it"
        assert self.penalty([x, y, COLON, A, A, C, x, y, COLON, A, A], C, (":a",)) == 2**0

    def test_a_breaker_may_have_several_tokens(self) -> None:
        x, y = b"xy"
        text = [A, COLON, x, y, C, A, COLON, x, y]
        assert self.penalty(text, C, (":xy",)) == 0
        assert self.penalty([A, COLON, x, y, B, C, A, COLON, x, y, B], C, (":xy",)) == 2**0

    def test_a_breaker_is_never_penalised(self) -> None:
        text = [A, B, COLON, A, B]
        assert self.penalty(text, COLON, ()) == 2
        assert self.penalty(text, COLON, (":",)) == 0

    def test_longest_breaker_counts(self) -> None:
        x, y = b"xy"
        text = [x, y, COLON, y, x, C, x, y, COLON, y, x]
        assert self.penalty(text, C, (":",)) == 2**1
        assert self.penalty(text, C, (":", ":y")) == 2**0

    def test_parameters_set_the_breakers(self) -> None:
        dry, _ = build_chain(SamplingParams(dry_multiplier=1, dry_sequence_breakers=[":"]), TOKENS).samplers[-2:]
        assert dry == Dry(1, 1.75, 2, 64, sequence_breakers(TOKENS, (":",)))


def test_tokens_suppressed_by_the_vocabulary_are_never_drawn() -> None:
    assert TOKENS.suppressed == (7, 9)
    assert SuppressTokens([7, 9]) in build_chain(SamplingParams(), TOKENS).samplers
    logits = np.zeros(TOKENS.n_vocab, np.float32)
    logits[[7, 9, 3]] = 3, 2, 1
    assert SamplerState(1, TOKENS).sample(logits.copy(), SamplingParams()) == 3
    assert SamplerState(1, TOKENS).sample(logits.copy(), SamplingParams(suppress_tokens=[3])) == 0
    assert SamplerState(1).sample(logits.copy(), SamplingParams()) == 7


def test_infinite_biases_apply_in_legal() -> None:
    logits, state = np.zeros(TOKENS.n_vocab, np.float32), SamplerState(1, TOKENS)
    forbids = SamplingParams(logit_bias={3: -np.inf, 4: 5.0})
    assert state.legal(logits, forbids).ids.tolist() == [i for i in range(TOKENS.n_vocab) if i not in (3, 7, 9)]
    assert not state.legal(logits, forbids).logits.any(), "others change no prior"
    assert state.legal(logits, SamplingParams(logit_bias={3: np.inf, 8: np.inf})).ids.tolist() == [3, 8]


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_penalties_of_large_counts_stay_finite(temp: float) -> None:
    state = SamplerState(1)
    for _ in range(1000):
        state.accept(0)
    params = SamplingParams(
        temperature=temp, repeat_penalty=1e6, frequency_penalty=1e6, presence_penalty=1e6, repeat_last_n=1000
    )
    assert state.sample(np.array([-3e38, 0], np.float32), params) == 1


@pytest.mark.parametrize("logit", [3.4e38, -3.4e38])
def test_overflowing_logits_are_clipped(logit: float) -> None:
    left = apply(np.array([logit, 1, -np.inf], np.float32), Penalties(3, 0.5 if logit > 0 else 2.0), history=[0, 2])
    assert np.isfinite(left.logits[0])
    assert np.isneginf(left.logits[2])
    assert np.isfinite(left.probabilities()).all()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, None),
        ({"repeat_penalty": 0.0}, None),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, None),
        ({"repeat_penalty": 1.1, "repeat_last_n": 1}, Penalties),
        ({"frequency_penalty": 0.1}, Penalties),
        ({"presence_penalty": -0.1}, Penalties),
        ({"dry_multiplier": 0.5, "dry_penalty_last_n": 0}, None),
        ({"dry_multiplier": 0.5, "dry_penalty_last_n": 1}, Dry),
    ],
)
def test_neutral_parameters_turn_a_sampler_off(fields: dict, kind: type | None) -> None:
    found = [type(one) for one in build_chain(SamplingParams(**fields), TOKENS).samplers]
    assert [one for one in found if one in (Penalties, Dry)] == ([kind] if kind else [])


def test_dry_allows_two_tokens_by_default() -> None:
    x, y, z = b"xyz"
    left = apply(np.zeros(TOKENS.n_vocab), Dry(1.0), history=[x, y, z, x, y])
    assert left.logits[z] == -1
    assert apply(np.zeros(TOKENS.n_vocab), Dry(1.0), history=[y, z, x, y]).logits[z] == 0

"""Allowed tokens, bad words and the minimum length."""

import numpy as np
import pytest

from candidates import apply
from llamacli import SamplingParams
from llamacli.errors import InvalidRequestError
from llamacli.sampling import AllowedTokens, BadWords, MinTokens, SamplerState, build_chain
from llamacli.testing.vocabularies import byte_level
from llamacli.tokenizer import tokenizer_from_metadata

TOKENS = tokenizer_from_metadata(byte_level(["a b", "ab c"]))
A, B, C, SPACE = b"abc "
AB, ABC = range(256, 258)


def forbidden(sampler, history=(), logits=None) -> set[int]:
    """Tokens that the sampler forbids."""
    left = apply(np.zeros(TOKENS.n_vocab) if logits is None else logits, sampler, history=list(history))
    return {*range(TOKENS.n_vocab)} - {int(token) for token in left.ids[np.isfinite(left.logits)]}


def test_allowed_tokens() -> None:
    assert forbidden(AllowedTokens([C, A])) == {*range(TOKENS.n_vocab)} - {A, C}
    state = SamplerState(1, TOKENS)
    chain = build_chain(SamplingParams(allowed_token_ids=(A, B), logit_bias={C: 50, B: 1}), TOKENS)
    assert state.sample(np.zeros(TOKENS.n_vocab, np.float32), chain) == B, "biases of what is left count"
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: token 9999"):
        build_chain(SamplingParams(allowed_token_ids=(9999,)), TOKENS)


def test_bad_words_are_forbidden_by_their_last_token() -> None:
    words = BadWords.from_params(SamplingParams(bad_words=("abcb", "a")), TOKENS)
    assert words.words == ((SPACE, A), (SPACE, ABC, B), (A,), (ABC, B))
    assert forbidden(words) == forbidden(words, [ABC, C]) == {A}
    assert forbidden(words, [C, ABC]) == {A, B}
    assert BadWords.from_params(SamplingParams(), TOKENS) is None
    with pytest.raises(InvalidRequestError, match="more than 64 tokens"):
        BadWords.from_params(SamplingParams(bad_words=("x" * 65,)), TOKENS)


def test_minimum_length() -> None:
    tokens = tokenizer_from_metadata(byte_level(["a b", "ab c"], eos_token_id=A))
    sampler = MinTokens.from_params(SamplingParams(min_tokens=2, end_token_ids=(C,)), tokens)
    assert forbidden(sampler) == forbidden(sampler, [A]) == {A, C}
    assert forbidden(sampler, [A, B]) == set()
    ended = np.full(TOKENS.n_vocab, -np.inf, np.float32)
    ended[C] = 0
    assert C not in forbidden(sampler, logits=ended), "a grammar's text is at its end"
    assert MinTokens.from_params(SamplingParams(), TOKENS) is None

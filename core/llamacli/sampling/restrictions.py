"""Samplers that forbid tokens: allowed tokens, bad words, minimum length.

Parameters and their meanings are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates, Ids
from llamacli.sampling.checks import integer
from llamacli.sampling.params import SamplingParams, token_ids
from llamacli.sampling.penalties import expect_tokens
from llamacli.sampling.sampler import Restriction
from llamacli.tokenizer import Tokenizer

MAX_WORD = 64
"""Tokens of a bad word at most."""


def _array(tokens: Iterable[int]) -> Ids:
    return np.array(token_ids(tokens), np.int32)


@attrs.frozen
class AllowedTokens(Restriction):
    """Forbid all tokens but these.

    Those of end of generation are forbidden too, unless they are among them.
    """

    tokens: Ids = attrs.field(converter=_array, eq=attrs.cmp_using(np.array_equal))

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Self | None:
        """Sampler of these parameters; None if they turn it off."""
        if tokenizer is not None:
            expect_tokens(params.allowed_token_ids, tokenizer.n_vocab, "allowed_token_ids")
        return cls(params.allowed_token_ids) if params.allowed_token_ids else None

    def restrict(self, candidates: Candidates) -> None:
        """Set other logits to minus infinity; InvalidRequestError if none is left."""
        places, _ = candidates.find(self.tokens)
        kept = candidates.logits[places]
        candidates.logits[:] = -np.inf
        candidates.logits[places] = kept
        candidates.check_drawable()


@attrs.frozen
class BadWords(Restriction):
    """Forbid sequences of tokens: the last one of each, after the others."""

    words: tuple[tuple[int, ...], ...]

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Self | None:
        """Sampler of these parameters; None if they turn it off.

        A word is forbidden as a text's beginning, and after a space. Raises InvalidRequestError for words without a
        tokenizer, and for one of more than MAX_WORD tokens.
        """
        if not params.bad_words:
            return None
        if tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer")
        words = set()
        for word in params.bad_words:
            spelled = word.lstrip(" ")
            ways = [tokenizer.encode_run(spelled, continues=True), tokenizer.encode_run(" " + spelled, continues=True)]
            if max(map(len, ways)) > MAX_WORD:
                raise InvalidRequestError(f"bad_words: {word[:40]!r} has more than {MAX_WORD} tokens")
            words |= {tuple(ids) for ids in ways if ids}
        return cls(tuple(sorted(words)))

    def restrict(self, candidates: Candidates) -> None:
        """Set last tokens' logits to minus infinity; InvalidRequestError if none is left."""
        before = tuple(candidates.history[-MAX_WORD:])
        last = [word[-1] for word in self.words if before[len(before) - len(word) + 1 :] == word[:-1]]
        if last:
            candidates.logits[candidates.find(_array(last))[0]] = -np.inf
            candidates.check_drawable()


@attrs.frozen
class MinTokens(Restriction):
    """Forbid tokens that end the text before it has `n` tokens.

    Where nothing else is left, as at the end of a grammar's text, they stay.
    """

    ends: Ids = attrs.field(converter=_array, eq=attrs.cmp_using(np.array_equal))
    n: int = integer(low=0)

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Self | None:
        """Sampler of these parameters; None if they turn it off."""
        ends = {*params.end_token_ids, *(tokenizer.eog_ids if tokenizer is not None else ())}
        return cls(ends, params.min_tokens) if params.min_tokens > 0 and ends else None

    def restrict(self, candidates: Candidates) -> None:
        """Set the logits of the ends to minus infinity."""
        if len(candidates.history) >= self.n:
            return
        places, _ = candidates.find(self.ends)
        kept = candidates.logits[places]
        candidates.logits[places] = -np.inf
        if np.isneginf(candidates.largest):
            candidates.logits[places] = kept

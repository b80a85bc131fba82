"""Samplers that change the logits of single tokens: bias, repetition penalties.

Penalties apply to tokens generated since the last `reset`; the prompt does not count.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import LARGEST, Candidates, Ids
from llamacli.sampling.checks import integer, number
from llamacli.sampling.params import SamplingParams, biases, token_ids
from llamacli.sampling.sampler import Restriction, Sampler
from llamacli.tokenizer import Tokenizer

Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""Token sequences that end a repetition: by first token, the tokens after it."""

_MAX_BYTES, _MAX_TOKENS = 40, 20


def expect_tokens(ids: Sequence[int], n_vocab: int, name: str) -> None:
    """Raise InvalidRequestError for ids beyond the vocabulary, naming the parameter."""
    unknown = [token for token in ids if token >= n_vocab]
    if unknown:
        raise InvalidRequestError(f"{name}: token {max(unknown)} is not in the vocabulary of {n_vocab} tokens")


@attrs.frozen
class LogitBias(Sampler):
    """Logit bias: add numbers to the logits of tokens.

    Minus infinity forbids a token; infinity leaves only such tokens.
    """

    bias: tuple[tuple[int, float], ...] = attrs.field(converter=biases)

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        """Sampler of these parameters; None if they turn it off."""
        if tokenizer is not None:
            expect_tokens([token for token, _ in params.logit_bias], tokenizer.n_vocab, "logit_bias")
        return cls(params.logit_bias) if params.logit_bias else None

    def apply(self, candidates: Candidates) -> None:
        """Add the biases; InvalidRequestError for unknown tokens, or if none is left."""
        self._add(self.bias, candidates)

    def restrict(self, candidates: Candidates) -> None:
        """Add the infinite biases."""
        self._add([(token, bias) for token, bias in self.bias if math.isinf(bias)], candidates)

    def _add(self, pairs: Sequence[tuple[int, float]], candidates: Candidates) -> None:
        tokens = [token for token, _ in pairs]
        expect_tokens(tokens, candidates.n_vocab, "logit_bias")
        ids = np.array(tokens, np.int32)
        bias = np.array([value for _, value in pairs], np.float32)
        places, which = candidates.find(ids)
        with np.errstate(over="ignore", invalid="ignore"):  # a forbidden token stays forbidden
            sums = candidates.logits[places] + bias[which]
        candidates.logits[places] = np.where(np.isnan(sums), -np.inf, sums)
        candidates.check_drawable()


@attrs.frozen
class SuppressTokens(Restriction):
    """Forbid tokens."""

    tokens: tuple[int, ...] = attrs.field(converter=token_ids)

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        """Sampler of these parameters; None if they turn it off."""
        tokens = params.suppress_tokens + (tokenizer.suppressed if tokenizer is not None else ())
        if tokenizer is not None:
            expect_tokens(params.suppress_tokens, tokenizer.n_vocab, "suppress_tokens")
        return cls(tokens) if tokens else None

    def restrict(self, candidates: Candidates) -> None:
        """Forbid the tokens; InvalidRequestError for unknown ones, or if none is left."""
        expect_tokens(self.tokens, candidates.n_vocab, "suppress_tokens")
        ids = np.array(self.tokens, np.int32)
        candidates.logits[candidates.find(ids)[0]] = -np.inf
        candidates.check_drawable()


@attrs.frozen
class Penalties(Sampler):
    """Repetition, frequency and presence penalties over the last n tokens.

    - `last_n`: how many of the latest tokens count; 0 or less is off.
    - `repeat`: logits of such tokens are divided by it if positive, multiplied if not, once per token (Keskar et al.
      2019); 1 is off, and so is 0 or less.
    - `frequency`: subtracted once for each occurrence.
    - `presence`: subtracted once.
    """

    last_n: int = integer()
    repeat: float = number(1.0)
    frequency: float = number(0.0)
    presence: float = number(0.0)

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        """Sampler of these parameters; None if they turn it off."""
        penalties = cls(params.repeat_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        neutral = (penalties.repeat <= 0 or penalties.repeat == 1) and penalties.frequency == penalties.presence == 0
        return None if neutral or penalties.last_n <= 0 else penalties

    def apply(self, candidates: Candidates) -> None:
        """Lower the logits."""
        if self.last_n <= 0 or not candidates.history:
            return
        counts = collections.Counter(candidates.history[-self.last_n :])
        places, which = candidates.find(np.fromiter(counts, np.int32))
        logits = before = candidates.logits[places]
        with np.errstate(over="ignore"):
            if self.repeat > 0:
                factor = np.float32(self.repeat)
                logits = np.where(logits > 0, logits / factor, logits * factor)
            if self.frequency or self.presence:
                n = np.fromiter(counts.values(), np.float32)[which]
                logits = logits - (n * np.float32(self.frequency) + np.float32(self.presence))
        # Clip to finite numbers: +inf would make a token certain, -inf is only for forbidden tokens.
        candidates.logits[places] = np.where(before == -np.inf, before, logits.clip(-LARGEST, LARGEST))


@attrs.frozen
class Dry(Sampler):
    """DRY: penalise tokens that would continue a repetition (p-e-w, text-generation-webui).

    A token that would repeat a sequence longer than `allowed_length` that is already among the last `last_n` tokens
    loses `multiplier` times `base` to the power of the excess length. No repetition reaches across a sequence breaker;
    a breaker of one token is never penalised.
    """

    multiplier: float = number(low=0)
    base: float = number(1.75, low=1)
    allowed_length: int = integer(2, low=0)
    last_n: int = integer(64)
    breakers: Breakers = attrs.field(factory=dict)

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        """Sampler of these parameters; None if they turn it off."""
        if params.dry_multiplier <= 0 or params.dry_penalty_last_n <= 0:
            return None
        breakers = sequence_breakers(tokenizer, params.dry_sequence_breakers) if tokenizer is not None else {}
        return cls(
            params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n, breakers
        )

    def apply(self, candidates: Candidates) -> None:
        """Lower the logits."""
        if self.last_n <= 0 or self.multiplier <= 0:
            return
        text = np.array(candidates.history[: -self.last_n - 1 : -1], np.int32)  # latest first
        limit = self._limit(text)
        if len(text) <= self.allowed_length or limit < self.allowed_length:
            return
        lengths = np.zeros(len(text), np.int64)
        kernels.repeat_lengths(text, lengths)
        longest: dict[int, int] = {}
        for place in np.flatnonzero(lengths[1:] >= self.allowed_length).tolist():
            token = int(text[place])  # followed the earlier occurrence
            longest[token] = max(longest.get(token, 0), min(int(lengths[place + 1]), limit))
        ids = np.array([token for token in sorted(longest) if () not in self.breakers.get(token, ())], np.int32)
        excess = np.array([longest[token] for token in ids.tolist()], np.float64) - self.allowed_length
        penalties = self.multiplier * self.base ** np.minimum(excess, self._max_excess())
        places, which = candidates.find(ids)
        with np.errstate(over="ignore"):
            candidates.logits[places] -= penalties[which].astype(np.float32)

    def _limit(self, text: Ids) -> int:
        """Number of latest tokens after the last sequence breaker."""
        for place, token in enumerate(text.tolist()):
            before = text[max(0, place - _MAX_TOKENS) : place][::-1].tolist()  # the tokens after it, in order
            found = [len(rest) for rest in self.breakers.get(token, ()) if list(rest) == before[: len(rest)]]
            if found:
                return place - max(found)
        return len(text)

    def _max_excess(self) -> float:
        return math.floor(math.log(LARGEST) / math.log(self.base)) if self.base > 1.000001 else math.inf


@functools.lru_cache(maxsize=4)
def sequence_breakers(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Token sequences in which these texts can appear.

    A text can lie within a token, or begin at a token's end and continue in the next ones.
    """
    breakers: dict[int, set[tuple[int, ...]]] = {}
    wanted = [text.encode()[:_MAX_BYTES] for text in texts if text]
    for token in range(tokenizer.n_vocab):
        piece = tokenizer.piece_bytes(token, unparse_special=True)
        for text in wanted:
            if text in piece:
                breakers.setdefault(token, set()).add(())
                continue
            for n in range(1, min(len(text), len(piece) + 1)):
                if piece.endswith(text[:n]):
                    rest = tokenizer.encode(text[n:].decode(errors="replace"), add_special=False)
                    breakers.setdefault(token, set()).add(tuple(rest[:_MAX_TOKENS]))
    return {token: tuple(sorted(rests)) for token, rests in breakers.items()}

"""Samplers that choose the token: the last in a chain."""

from __future__ import annotations

import math

import attrs
import numpy as np

from llamacli.sampling.candidates import Candidates
from llamacli.sampling.checks import number
from llamacli.sampling.sampler import Sampler
from llamacli.sampling.truncation import TopK


@attrs.frozen
class Greedy(Sampler):
    """Choose the likeliest token, the first of equals."""

    def apply(self, candidates: Candidates) -> None:
        """Choose."""
        candidates.choose(candidates.best())


@attrs.frozen
class Draw(Sampler):
    """Choose at random, each token as often as it is probable. One random number a token."""

    def apply(self, candidates: Candidates) -> None:
        """Choose."""
        candidates.choose(candidates.draw())


@attrs.define
class _Mirostat(Sampler):
    """What both versions share: `mu`, the surprise in bits that is allowed, learns from what is drawn and accepted."""

    tau: float = number(5.0, low=0)
    eta: float = number(0.1, low=0)
    mu: float = attrs.field(init=False)
    _pending: tuple[int, float] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def draw(self, candidates: Candidates) -> None:
        """Choose at random, and remember how surprising that was."""
        index = candidates.draw()
        surprise = candidates.surprisal(index) / math.log(2)
        candidates.choose(index)
        self._pending = (int(candidates.ids[index]), surprise)

    def accept(self, token: int) -> None:
        """Move `mu` by `eta` times the difference of the token's surprise from `tau`."""
        if self._pending is not None and self._pending[0] == token:
            self.mu -= self.eta * (self._pending[1] - self.tau)
        self._pending = None

    def reset(self) -> None:
        """Begin anew."""
        self.mu, self._pending = 2 * self.tau, None

    def clone(self) -> _Mirostat:
        """A copy with the same `mu`."""
        other = type(self)(self.tau, self.eta)
        other.mu, other._pending = self.mu, self._pending
        return other


@attrs.define
class Mirostat(_Mirostat):
    """Keep the surprise near `tau` bits by a top-k whose k is estimated for a Zipf distribution (Basu et al. 2021).

    `eta` is the rate of learning. The exponent is estimated from the most probable 100 tokens.
    """

    _ESTIMATED_FROM = 100

    def apply(self, candidates: Candidates) -> None:
        """Cut, and choose."""
        n = min(self._ESTIMATED_FROM, len(candidates))
        top = np.sort(np.partition(candidates.logits, -n)[-n:].astype(np.float64))[::-1]
        top = top[np.isfinite(top)]
        if len(top) > 1:
            ranks = np.arange(1, len(top))
            steps = np.log((ranks + 1) / ranks)
            slope = float(np.sum(steps * (top[:-1] - top[1:])) / np.sum(steps * steps))
            TopK(max(1, _zipf_k(slope, self.mu, candidates.n_vocab))).apply(candidates)
        self.draw(candidates)


def _zipf_k(slope: float, mu: float, n_vocab: int) -> int:
    """How many tokens of a Zipf distribution with this exponent are less surprising than `mu` bits (equation 30)."""
    excess = slope - 1
    try:
        # The limit of the fraction at an exponent of 1 is what it is for a natural logarithm.
        denominator = (1 - n_vocab**-excess) / excess if excess else math.log(n_vocab)
        return int(min((2**mu / denominator) ** (1 / slope), n_vocab))
    except (OverflowError, ZeroDivisionError):
        return n_vocab


@attrs.define
class MirostatV2(_Mirostat):
    """Keep the surprise near `tau` bits by cutting off what is more surprising than `mu` (Basu et al. 2021)."""

    def apply(self, candidates: Candidates) -> None:
        """Cut, and choose."""
        candidates.keep_from(candidates.largest + min(candidates.log_total() - self.mu * math.log(2), 0.0))
        self.draw(candidates)


@attrs.define
class AdaptiveP(Sampler):
    """Draw tokens whose probabilities are near a target, in the long run (llama.cpp, PR 17927).

    - `target`: the probability; below 0 it is a plain draw.
    - `decay`: how much the past counts: about the last 1 / (1 - decay) tokens.

    Where the tokens drawn of late were more probable than the target, less probable ones are aimed at, and the other
    way round. Logits become 5 - 10 d^2 / (1 + d), with d the distance of the probability to what is aimed at, in
    units of 0.3.
    """

    target: float = number(low=-1, high=1)
    decay: float = number(0.9, low=0, high=0.99)
    _sum: float = attrs.field(init=False)
    _weight: float = attrs.field(init=False)
    _pending: tuple[int, float] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def apply(self, candidates: Candidates) -> None:
        """Choose."""
        if self.target < 0:
            candidates.choose(candidates.draw())
            return
        p = candidates.probabilities().copy()
        aim = min(max(2 * self.target - self._sum / self._weight, 0.0), 1.0)
        distance = np.abs(p - aim) / 0.3
        possible = candidates.logits > -np.inf
        candidates.logits[possible] = (5 - 10 * distance * distance / (1 + distance))[possible]
        index = candidates.draw()
        self._pending = (int(candidates.ids[index]), float(p[index]))
        candidates.choose(index)

    def accept(self, token: int) -> None:
        """Count the probability that the token had."""
        if self._pending is not None and self._pending[0] == token:
            self._sum = self._pending[1] + self.decay * self._sum
            self._weight = 1 + self.decay * self._weight
        self._pending = None

    def reset(self) -> None:
        """Begin as if all tokens so far had met the target."""
        self._weight = 1 / (1 - self.decay)
        self._sum, self._pending = self.target * self._weight, None

    def clone(self) -> AdaptiveP:
        """A copy with the same memory."""
        other = AdaptiveP(self.target, self.decay)
        other._sum, other._weight, other._pending = self._sum, self._weight, self._pending
        return other

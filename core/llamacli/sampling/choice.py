"""Samplers that draw the token; the last in a chain."""

from __future__ import annotations

import copy
import math

import attrs
import numpy as np

from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.checks import number
from llamacli.sampling.sampler import CompiledSampler, Sampler
from llamacli.sampling.truncation import TopK


@attrs.frozen
class Greedy(CompiledSampler):
    """Take the most probable token, the first of equal ones."""

    kind = kernels.GREEDY


@attrs.frozen
class Draw(CompiledSampler):
    """Random draw by probability; takes one random number per token."""

    kind = kernels.DRAW


@attrs.define
class _Mirostat(Sampler):
    """State of both Mirostat versions.

    `mu` is the allowed surprisal in bits, updated after each drawn token that is accepted.
    """

    tau: float = number(5.0, low=0)
    eta: float = number(0.1, low=0)
    mu: float = attrs.field(init=False)
    _pending: tuple[int, float] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def draw(self, candidates: Candidates) -> None:
        index = candidates.draw()
        surprise = candidates.surprisal(index) / math.log(2)
        candidates.choose(index)
        self._pending = (int(candidates.ids[index]), surprise)

    def accept(self, token: int) -> None:
        if self._pending is not None and self._pending[0] == token:
            self.mu -= self.eta * (self._pending[1] - self.tau)
        self._pending = None

    def reset(self) -> None:
        self.mu, self._pending = 2 * self.tau, None

    def clone(self) -> _Mirostat:
        return copy.copy(self)


@attrs.define
class Mirostat(_Mirostat):
    """Mirostat: keep the surprisal near `tau` bits (Basu et al. 2021).

    A top-k whose k is estimated for a Zipf distribution; its exponent is estimated from the most probable 100 tokens.
    `eta` is the learning rate.
    """

    _ESTIMATED_FROM = 100

    def apply(self, candidates: Candidates) -> None:
        """Truncate the candidates and draw."""
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
    """Number of tokens of a Zipf distribution below `mu` bits (equation 30)."""
    excess = slope - 1
    try:
        # For an exponent of 1 the fraction has the natural logarithm as its limit.
        denominator = (1 - n_vocab**-excess) / excess if excess else math.log(n_vocab)
        base = 2**mu / denominator
        if not slope:  # equal logits: the limit of the power
            return 1 if base <= 1 else n_vocab
        return int(min(base ** (1 / slope), n_vocab))
    except (OverflowError, ZeroDivisionError):
        return n_vocab


@attrs.define
class MirostatV2(_Mirostat):
    """Mirostat 2.0: drop tokens above `mu` bits (Basu et al. 2021)."""

    def apply(self, candidates: Candidates) -> None:
        """Truncate the candidates and draw."""
        candidates.keep_from(candidates.largest + min(candidates.log_total() - self.mu * math.log(2), 0.0))
        self.draw(candidates)


@attrs.define
class AdaptiveP(Sampler):
    """Adaptive-p: draw tokens near a target probability (llama.cpp, PR 17927).

    - `target`: the probability; below 0 it is a plain draw.
    - `decay`: weight of the past: about the last 1 / (1 - decay) tokens count.

    If recent tokens were more probable than the target, less probable ones are preferred, and the reverse. Logits
    become 5 - 10 d^2 / (1 + d), with d the distance of the probability from the adapted target, in units of 0.3.
    """

    target: float = number(low=-1, high=1)
    decay: float = number(0.9, low=0, high=0.99)
    _sum: float = attrs.field(init=False)
    _weight: float = attrs.field(init=False)
    _pending: tuple[int, float] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.reset()

    def apply(self, candidates: Candidates) -> None:
        """Draw the token."""
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
        """Add the probability of the token to the running mean."""
        if self._pending is not None and self._pending[0] == token:
            self._sum = self._pending[1] + self.decay * self._sum
            self._weight = 1 + self.decay * self._weight
        self._pending = None

    def reset(self) -> None:
        """Reset the running mean to the target."""
        self._weight = 1 / (1 - self.decay)
        self._sum, self._pending = self.target * self._weight, None

    def clone(self) -> AdaptiveP:
        """A copy with the same running mean."""
        return copy.copy(self)

"""How sure a distribution was, and how well a text was foreseen: surprisal, entropy, perplexity (Shannon 1948).

Two levels are told apart: what the model said, and what samplers have made of it.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Logits, as_logits
from llamacli.util.numbers import is_integer, is_real

_LARGEST_EXPONENT = math.log(np.finfo(np.float64).max)


def surprisal(logits: Logits, token: int, *, base: float = math.e) -> float:
    """Minus the logarithm of a token's probability, which is the softmax of float32 [n_vocab] logits.

    In nats, or with a `base` of 2 in bits. Logits that are not finite count as no tokens; infinite for such a one, and
    for what is not in the vocabulary. Raises InvalidRequestError for what is no row of logits, and no base above 1.
    """
    logits, unit = as_logits(logits), _unit(base)
    if not is_integer(token) or not 0 <= token < len(logits) or not np.isfinite(logits[token]):
        return math.inf
    finite = _finite(logits)
    largest = float(finite.max())
    return (kernels.log_sum_exp(finite, largest) - (float(logits[token]) - largest)) / unit


def entropy(logits: Logits, *, base: float = math.e) -> float:
    """The surprisal that is to be expected of a token drawn; infinite if no logit is finite. Else as `surprisal`."""
    finite, unit = _finite(as_logits(logits)), _unit(base)
    if not len(finite):
        return math.inf
    largest = float(finite.max())
    return float(kernels.entropy(finite, largest, kernels.log_sum_exp(finite, largest))) / unit


def _finite(logits: Logits) -> Logits:
    """Those of logits that are finite: mostly all, and then nothing is copied."""
    finite = np.isfinite(logits)
    return logits if finite.all() else logits[finite]


def _unit(base: float) -> float:
    """The nats that one unit of this base has."""
    if not is_real(base) or not 1 < base < math.inf:
        raise InvalidRequestError(f"base = {base!r} is not a number above 1")
    return math.log(base)


def perplexity_of(total: float, n: int) -> float:
    """e to the mean of n surprisals, given their sum in nats: among how many tokens it was as if to guess.

    Infinite if there are none.
    """
    mean = total / n if n else math.inf
    return math.exp(mean) if mean <= _LARGEST_EXPONENT else math.inf


@attrs.frozen
class Level:
    """What the distributions of one level said of the tokens accepted so far.

    - `surprisal`: of the last token, in nats; infinite if there is none or it had no probability.
    - `entropy`: of the distribution that the last token is from, in nats; infinite if there is none.
    - `n_tokens`, `total`: how many finite surprisals there were, and their sum.
    """

    surprisal: float = math.inf
    entropy: float = math.inf
    n_tokens: int = 0
    total: float = 0.0

    @property
    def perplexity(self) -> float:
        """e to the mean surprisal of all tokens so far; infinite before the first."""
        return perplexity_of(self.total, self.n_tokens)

    @property
    def surprisal_bits(self) -> float:
        """`surprisal` in bits."""
        return self.surprisal / math.log(2)

    @property
    def entropy_bits(self) -> float:
        """`entropy` in bits."""
        return self.entropy / math.log(2)

    def after(self, surprisal: float, entropy: float) -> Level:
        """With one more token, whose surprisal is added if it is finite."""
        if not math.isfinite(surprisal):
            return attrs.evolve(self, surprisal=surprisal, entropy=entropy)
        return Level(surprisal, entropy, self.n_tokens + 1, self.total + surprisal)


@attrs.frozen
class Metrics:
    """Of a text that is being written: by the `model`'s own logits, and by those that samplers drew from."""

    model: Level = Level()
    sampling: Level = Level()

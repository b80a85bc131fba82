"""Surprisal, entropy and perplexity (Shannon 1948).

Measured for two distributions: the model's own, and the one after samplers.
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
    """Negative log-probability of a token under float32 [n_vocab] logits.

    In nats, or with a `base` of 2 in bits. Logits that are not finite are ignored; the result is infinite for such a
    token, and for ids outside of the vocabulary. Raises InvalidRequestError if the logits are not a row of numbers or
    the base is not above 1.
    """
    logits, unit = as_logits(logits), _unit(base)
    if not is_integer(token) or not 0 <= token < len(logits) or not np.isfinite(logits[token]):
        return math.inf
    finite = _finite(logits)
    largest = float(finite.max())
    return (kernels.log_sum_exp(finite, largest) - (float(logits[token]) - largest)) / unit


def entropy(logits: Logits, *, base: float = math.e) -> float:
    """Shannon entropy of float32 [n_vocab] logits; infinite if none is finite.

    `base` and errors as in `surprisal`.
    """
    finite, unit = _finite(as_logits(logits)), _unit(base)
    if not len(finite):
        return math.inf
    largest = float(finite.max())
    return float(kernels.entropy(finite, largest, kernels.log_sum_exp(finite, largest))) / unit


def _finite(logits: Logits) -> Logits:
    finite = np.isfinite(logits)
    return logits if finite.all() else logits[finite]


def _unit(base: float) -> float:
    if not is_real(base) or not 1 < base < math.inf:
        raise InvalidRequestError(f"base = {base!r} is not a number above 1")
    return math.log(base)


def perplexity_of(total: float, n: int) -> float:
    """Perplexity: e to total / n, in nats; infinite if n is 0."""
    mean = total / n if n else math.inf
    return math.exp(mean) if mean <= _LARGEST_EXPONENT else math.inf


@attrs.frozen
class Level:
    """Statistics of one distribution over the tokens accepted so far.

    - `surprisal`: of the last token, in nats; infinite before the first and for a token of probability 0.
    - `entropy`: of the distribution of the last token, in nats; infinite before the first.
    - `n_tokens`, `total`: number and sum of the finite surprisals.
    """

    surprisal: float = math.inf
    entropy: float = math.inf
    n_tokens: int = 0
    total: float = 0.0

    @property
    def perplexity(self) -> float:
        """Perplexity of all tokens so far; infinite before the first."""
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
        """The statistics with one more token; infinite surprisals are not summed."""
        if not math.isfinite(surprisal):
            return attrs.evolve(self, surprisal=surprisal, entropy=entropy)
        return Level(surprisal, entropy, self.n_tokens + 1, self.total + surprisal)


@attrs.frozen
class Metrics:
    """Metrics of a text under the `model`'s logits and after samplers."""

    model: Level = Level()
    sampling: Level = Level()

"""The sampling chain: penalties, temperature, top-k, softmax, top-p, min-p, draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.sampling.params import SamplingParams


class Sampler:
    """A seeded stream of draws. The same seed, logits and parameters give the same tokens."""

    def __init__(self, seed: int):
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: npt.NDArray[np.float32], recent: Sequence[int], params: SamplingParams) -> int:
        """Draw a token id from float32 [n_vocab] logits. Penalties and temperature change `logits` in place.

        `recent` are the ids generated so far, oldest first. Raises InvalidRequestError if a logit is NaN or all are
        minus infinity.
        """
        apply_penalty(logits, recent, params)
        best = int(np.argmax(logits))  # the first of equals; a NaN, if there is one
        if np.isnan(logits[best]) or np.isneginf(logits[best]):
            raise InvalidRequestError(f"cannot sample: the largest logit is {logits[best]}, of token {best}")
        temp, largest = np.float32(params.temp), logits[best]
        if temp <= 0:
            return best
        with np.errstate(over="ignore"):
            logits /= temp
        if np.isfinite(largest) and np.isinf(logits[best]):
            return best  # so cold that only the largest logit counts
        ids = kept_by_top_k(logits, params.top_k)
        probabilities = softmax(logits[ids])
        kept = kept_by_top_p(probabilities, params.top_p)
        kept &= probabilities >= params.min_p * probabilities.max()
        ids, cumulative = ids[kept], np.cumsum(probabilities[kept])
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])


def apply_penalty(logits: npt.NDArray[np.float32], recent: Sequence[int], params: SamplingParams) -> None:
    """Make recently generated tokens less likely, in place."""
    if params.penalty in (0, 1) or params.penalty < 0 or params.penalty_last_n <= 0 or not recent:
        return
    ids = np.unique(np.asarray(recent[-params.penalty_last_n :]))
    factor = np.float32(params.penalty)
    logits[ids] = np.where(logits[ids] > 0, logits[ids] / factor, logits[ids] * factor)


def kept_by_top_k(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """The ids, ascending, of the k largest logits and of all that equal the k-th."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    threshold = np.partition(logits, -k)[-k]
    return np.flatnonzero(logits >= threshold)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Probabilities in float64, so that their sums over large vocabularies keep their digits."""
    largest = logits.max()
    if np.isposinf(largest):
        certain = np.isposinf(logits)
        return certain / certain.sum()
    e = np.exp(logits.astype(np.float64) - largest)
    return e / e.sum()


def kept_by_top_p(probabilities: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.bool_]:
    """Mask of the fewest most probable entries whose sum reaches p, at least one; among equals the first are kept."""
    kept = np.ones(len(probabilities), np.bool_)
    if p >= 1:
        return kept
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept[order[before >= p]] = False
    kept[order[0]] = True
    return kept

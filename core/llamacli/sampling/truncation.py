"""Truncation samplers: top-k, top-p, min-p, typical-p, top-n-sigma and XTC."""

from __future__ import annotations

import math

import attrs
import numpy as np

from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.checks import integer, number
from llamacli.sampling.sampler import CompiledSampler, Sampler


@attrs.frozen
class TopK(CompiledSampler):
    """Top-k: keep the k most probable tokens, and ties with the last.

    k of 0 or less keeps all.
    """

    kind = kernels.TOP_K
    k: int = integer()


@attrs.frozen
class TopP(CompiledSampler):
    """Top-p, nucleus sampling: keep a total probability (Holtzman et al. 2020).

    Keep the fewest most probable tokens whose probabilities sum to at least p; 1 keeps all. The sum is compared as
    float32, the precision of logits and p. Of equal tokens the first are kept.
    """

    kind = kernels.TOP_P
    p: float = number(low=0, high=1)


@attrs.frozen
class MinP(CompiledSampler):
    """Min-p: drop tokens far below the most probable (Nguyen et al. 2024).

    Keep tokens whose probability is at least p times that of the most probable one; 0 keeps all.
    """

    kind = kernels.NEAR_LARGEST
    p: float = number(low=0)

    @property
    def value(self) -> float:
        return min(math.log(self.p), 0.0) if self.p > 0 else -math.inf


@attrs.frozen
class TypicalP(Sampler):
    """Locally typical sampling: keep tokens of typical surprisal (Meister et al. 2022).

    Keep the tokens whose surprisal is nearest to the entropy until their probabilities sum to more than p; 1 keeps all.
    Of equal distances the more probable are kept, then the first.
    """

    p: float = number(low=0, high=1)

    def apply(self, candidates: Candidates) -> None:
        """Keep the locally typical tokens."""
        if self.p >= 1:
            return
        p, entropy = candidates.probabilities(), candidates.entropy()
        surprise = candidates.log_total() - (candidates.logits.astype(np.float64) - candidates.largest)
        by_logit = candidates.falling_order()
        with np.errstate(over="ignore"):
            unlike = np.abs(surprise - entropy).astype(np.float32)[by_logit]
        order = by_logit[candidates.falling_order(-unlike)]
        last = np.searchsorted(np.cumsum(p[order]).astype(np.float32), np.float32(self.p), side="right")
        candidates.keep(order[: last + 1])


@attrs.frozen
class TopNSigma(Sampler):
    """Top-n-sigma: keep logits near the largest (Tang et al. 2024).

    Keep logits at most n standard deviations below the largest; 0 or less keeps all.
    """

    n: float = number()

    def apply(self, candidates: Candidates) -> None:
        """Keep logits above the threshold."""
        if self.n > 0:
            candidates.keep_from(candidates.largest - self.n * candidates.deviation())


@attrs.frozen
class Xtc(Sampler):
    """XTC: sometimes exclude the top choices (p-e-w, text-generation-webui, PR 6335).

    With this probability, of the tokens that reach the threshold only the least probable is kept. A probability of 0 or
    a threshold above one half is off.
    """

    probability: float = number(low=0, high=1)
    threshold: float = number(low=0, high=1)

    def apply(self, candidates: Candidates) -> None:
        """Exclude the top choices, at random."""
        if self.probability <= 0 or self.threshold > 0.5 or len(candidates) < 2:
            return
        if candidates.random.random() > self.probability:
            return
        if self.threshold <= 0:
            top = np.arange(len(candidates))
        else:
            least = candidates.largest + candidates.log_total() + math.log(self.threshold)
            top = np.flatnonzero(candidates.logits >= np.float32(least))
        if len(top) > 1:
            mask = np.ones(len(candidates), np.bool_)
            mask[top] = False
            latest_first = top[::-1]
            mask[latest_first[np.argmin(candidates.logits[latest_first])]] = True
            candidates.keep_where(mask)

"""Samplers that take improbable tokens out; XTC takes out probable ones."""

from __future__ import annotations

import math

import attrs
import numpy as np

from llamacli.sampling.candidates import Candidates
from llamacli.sampling.checks import number, whole
from llamacli.sampling.sampler import Sampler


@attrs.frozen
class TopK(Sampler):
    """Keep the k tokens of the largest logits, and those that tie with the last of them; k of 0 or less keeps all."""

    k: int = whole()

    def apply(self, candidates: Candidates) -> None:
        """Keep the k likeliest."""
        if 0 < self.k < len(candidates):
            candidates.keep_from(float(candidates.kth_largest(self.k)))


@attrs.frozen
class TopP(Sampler):
    """Keep the fewest likeliest tokens whose probabilities sum to at least p; 1 keeps all (Holtzman et al. 2020).

    The sum is compared as float32, in which logits and p are known. Of equals the first are kept.
    """

    p: float = number(low=0, high=1)

    def apply(self, candidates: Candidates) -> None:
        """Keep the nucleus."""
        if self.p >= 1:
            return
        largest, total = candidates.largest, candidates.log_total()
        # Tokens below a share of (1 - p) / n sum to less than 1 - p, so the others reach p without them.
        candidates.keep_from(largest + min(total + math.log((1 - self.p) / (2 * len(candidates))), 0.0))
        order = candidates.falling_order()
        falling = candidates.logits[order].astype(np.float64)
        reached = np.cumsum(np.exp(falling - largest - total)).astype(np.float32)
        last = np.searchsorted(reached, np.float32(self.p))
        candidates.keep(order[: last + 1])


@attrs.frozen
class MinP(Sampler):
    """Keep tokens whose probability is at least this share of the likeliest one's; 0 keeps all (Nguyen et al. 2024)."""

    p: float = number(low=0)

    def apply(self, candidates: Candidates) -> None:
        """Keep what is probable enough."""
        if self.p > 0:
            candidates.keep_from(candidates.largest + min(math.log(self.p), 0.0))


@attrs.frozen
class TypicalP(Sampler):
    """Keep the tokens whose surprise is nearest to the expected one until they sum to more than p; 1 keeps all.

    Meister et al. 2022. Of equals the likelier are kept, then the first.
    """

    p: float = number(low=0, high=1)

    def apply(self, candidates: Candidates) -> None:
        """Keep the locally typical."""
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
    """Keep logits at most n standard deviations below the largest; 0 or less keeps all (Tang et al. 2024)."""

    n: float = number()

    def apply(self, candidates: Candidates) -> None:
        """Keep what stands out."""
        if self.n <= 0:
            return
        candidates.keep_from(candidates.largest - self.n * candidates.deviation())


@attrs.frozen
class Xtc(Sampler):
    """With this probability, exclude the top choices: of tokens that reach the threshold keep the least likely only.

    A probability of 0 and a threshold above one half are off. XTC is by p-e-w (text-generation-webui, PR 6335).
    """

    probability: float = number(low=0, high=1)
    threshold: float = number(low=0, high=1)

    def apply(self, candidates: Candidates) -> None:
        """Sometimes take out what is likeliest."""
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

"""Truncation samplers: top-k, top-p, min-p, typical-p, top-n-sigma, XTC and infill."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Self

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.checks import integer, number
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.sampler import CompiledSampler, Sampler
from llamacli.tokenizer import Tokenizer


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


INFILL_LEAST = 0.2
"""Probability below which infill keeps no token of text."""
INFILL_END = 3
"""Infill ends the text if its ends have a probability of 1 / (3 n + 1) or more, among n candidates."""


@attrs.frozen
class Infill(Sampler):
    """Infill: end uncertain texts of fill-in-the-middle early (llama.cpp, PR 9896).

    Keep only tokens that end generation if they are likely enough. Else count tokens of which one's text begins the
    other's as the more probable one, and drop those below 0.2, then those below 1 / (n + 1), of n that are left; where
    none is left, the text ends. It follows top-k, and is in no order of samplers by default.
    """

    tokenizer: Tokenizer

    @classmethod
    def from_params(cls, _params: SamplingParams, tokenizer: Tokenizer | None) -> Self:
        """Sampler for a vocabulary; InvalidRequestError without one."""
        if tokenizer is None:
            raise InvalidRequestError("infill needs a tokenizer")
        return cls(tokenizer)

    def apply(self, candidates: Candidates) -> None:
        """Keep clear continuations, or ends."""
        order = candidates.falling_order()
        ids = candidates.ids[order].tolist()
        p: list[float] = candidates.probabilities()[order].tolist()
        ends = [token in self.tokenizer.eog_ids for token in ids]
        p_end = math.fsum(one for one, is_end in zip(p, ends, strict=True) if is_end)
        if INFILL_END * p_end * len(p) > math.fsum(p) - p_end:
            candidates.keep(order[ends])
            return
        self._merge(ids, p)
        kept = [i for i, one in enumerate(p) if ends[i] or one >= INFILL_LEAST]
        n_texts = sum(not ends[i] for i in kept)
        if n_texts:
            least = math.fsum(p[i] for i in kept) / (n_texts + 1)
            candidates.keep(order[[i for i in kept if ends[i] or p[i] >= least]])
        elif not any(candidates.restore(end) for end in (self.tokenizer.eot_id, self.tokenizer.eos_id)):
            candidates.keep(order[:1])

    def _merge(self, ids: list[int], p: list[float]) -> None:
        """Add up the probabilities of tokens that begin alike.

        Those that are counted elsewhere become 0.
        """
        pieces = [self.tokenizer.piece_bytes(token) for token in ids]
        sorted_pieces = sorted((piece, i) for i, piece in enumerate(pieces))
        for i, piece in enumerate(pieces):
            for other in _continuing(piece, sorted_pieces) if piece else ():
                if not p[i]:
                    break
                if other != i and p[other]:
                    into, of = (other, i) if p[other] > p[i] else (i, other)
                    p[into] += p[of]
                    p[of] = 0.0


def _continuing(piece: bytes, sorted_pieces: list[tuple[bytes, int]]) -> list[int]:
    """Places of pieces that begin with one, ascending."""
    first = bisect.bisect_left(sorted_pieces, (piece,))
    pairs = (sorted_pieces[place] for place in range(first, len(sorted_pieces)))
    return sorted(i for _, i in itertools.takewhile(lambda pair: pair[0].startswith(piece), pairs))

"""Log-probabilities of tokens by the model's own logits."""

from __future__ import annotations

import attrs
import numpy as np

from llamacli.sampling.candidates import Candidates


@attrs.frozen
class LogProbs:
    """Natural log-probabilities: log-softmax of the model's unmodified logits.

    - `chosen`: of the token that was drawn.
    - `top`: pairs of id and log-probability of the most probable tokens, in descending order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(candidates: Candidates, chosen: int, n: int) -> LogProbs:
    """Log-probabilities of a token and of the n most probable ones.

    `candidates` hold the whole vocabulary, and are truncated to the n most probable.
    """
    largest, total = candidates.largest, candidates.log_total()
    logit = float(candidates.logits[np.searchsorted(candidates.ids, chosen)])
    if n < len(candidates):
        candidates.keep_from(float(candidates.kth_largest(n)))
    top = candidates.falling_order()[:n]
    pairs = zip(candidates.ids[top].tolist(), candidates.logits[top].tolist(), strict=True)
    return LogProbs(logit - largest - total, tuple((token, value - largest - total) for token, value in pairs))

"""Log-probabilities of tokens by the model's own logits."""

from __future__ import annotations

import attrs
import numpy as np

from llamacli.sampling.candidates import Candidates


@attrs.frozen
class LogProbs:
    """Natural log-probabilities of tokens.

    They are the log-softmax of the model's unmodified logits, or of what samplers made of them.
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


def drawn_probabilities(candidates: Candidates, *, greedy: bool, n: int) -> LogProbs:
    """Log-probabilities by which a token was drawn.

    Its own, and those of the n most probable candidates.
    Of a `greedy` draw the chosen token has all the probability. Candidates of probability 0 are left out.
    """
    chosen = candidates.chosen
    assert chosen is not None
    if greedy:
        return LogProbs(0.0, ((chosen, 0.0),))
    probabilities = candidates.probabilities()
    with np.errstate(divide="ignore"):
        logs = np.log(probabilities)
    order = [i for i in np.argsort(-probabilities, kind="stable")[:n] if probabilities[i] > 0]
    place = np.flatnonzero(candidates.ids == chosen)[0]
    return LogProbs(float(logs[place]), tuple((int(candidates.ids[i]), float(logs[i])) for i in order))

"""One distribution made of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Logits, as_logits
from llamacli.util.numbers import is_real


def merge_logits(logits: Sequence[Logits], weights: Sequence[float], *, alpha: float = 0.0) -> Logits:
    """One set of logits, float32 [n_vocab], made of several: a weighted product of experts (Hinton 2002).

        merged(x) = sum of weights[i] * log p_i(x), where p_i is the softmax of logits[i]

    This is so for the tokens x that the first finds plausible, p_0(x) >= alpha * max p_0. It is minus infinity for all
    others, and for those that any with a weight other than 0 gives minus infinity. Uses of the field:

    - weights 1, -1 and an alpha of 0.1: contrastive decoding of an expert and an amateur (Li et al. 2023); as
      1 + b, -b where the contrast has a strength (O'Brien and Lewis 2023).
    - 1 + b, -b: of a text with and without a context, context-aware decoding (Shi et al. 2024); with and without a
      prompt, classifier-free guidance of scale 1 + b (Sanchez et al. 2023).
    - 1, b, -b: of a model, an expert and an anti-expert (Liu et al. 2021).
    - weights from 0 on that sum to 1: the weighted geometric mean, a logarithmic opinion pool.

    Raises InvalidRequestError if shapes differ, if a logit is NaN or infinity, for weights that are not finite or all
    0, for an alpha that is not from 0 to 1, and if no token is left.
    """
    logits = [as_logits(each) for each in logits]
    if len(logits) != len(weights) or len(set(map(len, logits))) > 1 or not all(map(len, logits)):
        shapes = ", ".join(str(each.shape) for each in logits)
        raise InvalidRequestError(f"cannot merge logits of shapes {shapes} with {len(weights)} weights")
    for weight in weights:
        if not is_real(weight) or not math.isfinite(weight):
            raise InvalidRequestError(f"cannot merge logits: weight {weight!r} is not a finite number")
    if not any(weights):
        raise InvalidRequestError("cannot merge logits: there is no weight but 0")
    if not is_real(alpha) or not 0 <= alpha <= 1:
        raise InvalidRequestError(f"cannot merge logits: alpha = {alpha!r} is not a number from 0 to 1")
    merged, possible = np.zeros(len(logits[0])), np.ones(len(logits[0]), np.bool_)
    for i, (each, weight) in enumerate(zip(logits, weights, strict=True)):
        if weight:
            log_p = _log_softmax(each, i)
            possible &= log_p > -np.inf
            with np.errstate(invalid="ignore"):  # infinities meet where a token is not possible anyway
                merged += weight * log_p
    if alpha > 0:
        log_p = _log_softmax(logits[0], 0)
        possible &= log_p >= log_p.max() + math.log(alpha)
    if not possible.any():
        raise InvalidRequestError("cannot merge logits: no token is possible by all of them")
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.where(possible, merged, -np.inf).astype(np.float32)
    if not np.isfinite(result[possible]).all():
        raise InvalidRequestError(f"cannot merge logits: with weights {list(weights)} they are too large for float32")
    return result


def _log_softmax(logits: Logits, i: int) -> npt.NDArray[np.float64]:
    """float64 [n_vocab]: the logarithms of probabilities."""
    largest = float(logits.max())
    if not math.isfinite(largest):
        raise InvalidRequestError(f"cannot merge logits: the largest of logits[{i}] is {largest}")
    relative: npt.NDArray[np.float64] = logits.astype(np.float64) - largest
    return relative - kernels.log_sum_exp(logits, largest)

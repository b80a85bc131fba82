"""Weighted combination of several distributions."""

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
    """Weighted product of experts over several logits (Hinton 2002).

        merged(x) = sum of weights[i] * log p_i(x), where p_i is the softmax of logits[i]

    Returns float32 [n_vocab]. Only tokens x that the first distribution finds plausible, p_0(x) >= alpha * max p_0, get
    that value; the others are minus infinity, and so are tokens that any distribution of non-zero weight gives minus
    infinity. Known uses:

    - weights 1, -1 and an alpha of 0.1: contrastive decoding of an expert and an amateur (Li et al. 2023); as
      1 + b, -b with a contrast of strength b (O'Brien and Lewis 2023).
    - 1 + b, -b: a text with and without a context, context-aware decoding (Shi et al. 2024); with and without a
      prompt, classifier-free guidance of scale 1 + b (Sanchez et al. 2023).
    - 1, b, -b: a model, an expert and an anti-expert (Liu et al. 2021).
    - non-negative weights that sum to 1: the weighted geometric mean, a logarithmic opinion pool.

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
        raise InvalidRequestError("cannot merge logits: all weights are 0")
    if not is_real(alpha) or not 0 <= alpha <= 1:
        raise InvalidRequestError(f"cannot merge logits: alpha = {alpha!r} is not a number from 0 to 1")
    merged, possible = np.zeros(len(logits[0])), np.ones(len(logits[0]), np.bool_)
    for i, (each, weight) in enumerate(zip(logits, weights, strict=True)):
        if weight:
            log_p = _log_softmax(each, i)
            possible &= log_p > -np.inf
            with np.errstate(invalid="ignore"):  # inf - inf only for tokens that are not possible
                merged += weight * log_p
    if alpha > 0:
        log_p = _log_softmax(logits[0], 0)
        possible &= log_p >= log_p.max() + math.log(alpha)
    if not possible.any():
        raise InvalidRequestError("cannot merge logits: no token is possible under all of them")
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.where(possible, merged, -np.inf).astype(np.float32)
    if not np.isfinite(result[possible]).all():
        raise InvalidRequestError(f"cannot merge logits: weights {list(weights)} overflow float32")
    return result


def _log_softmax(logits: Logits, i: int) -> npt.NDArray[np.float64]:
    """Log-softmax, float64 [n_vocab]."""
    largest = float(logits.max())
    if not math.isfinite(largest):
        raise InvalidRequestError(f"cannot merge logits: the largest of logits[{i}] is {largest}")
    relative: npt.NDArray[np.float64] = logits.astype(np.float64) - largest
    return relative - kernels.log_sum_exp(logits, largest)

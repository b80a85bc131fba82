"""Single-threaded kernels over the logits of a vocabulary.

For up to some hundred thousand tokens. Logits are float32. Exponentials and sums are float64, so that sums over a large
vocabulary stay accurate; the order of sums does not depend on the machine. Long scans process blocks: counting the
logits above a threshold in a block is a vector operation, and few blocks have any.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llamacli.kernels.deferred import register_jitable
from llamacli.kernels.jit import array_function

_BLOCK = 64
_BITS = 11
_DIGITS = 1 << _BITS
_VALUE = np.uint32(0x7FFFFFFF)
"""Bits of a float but for its sign."""

_FEW = 256
"""Keys that NumPy sorts as fast: counting digits takes as long for one key as for a thousand."""


@register_jitable
def _any_from(x: Any, start: int, stop: int, threshold: Any) -> bool:
    count = 0
    for i in range(start, stop):
        count += x[i] >= threshold
    return count > 0


@register_jitable
def _sift_down(heap: Any, x: Any) -> None:
    """Replace the root of a min-heap."""
    i, n = 0, len(heap)
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= x:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = x


@array_function("float32(float32[::1], float32[::1])")
def kth_largest(logits: Any, heap: Any) -> Any:
    """k-th largest logit.

    k is the length of `heap`, which is scratch.
    """
    heap[:] = -np.inf
    for start in range(0, len(logits), _BLOCK):
        stop = min(start + _BLOCK, len(logits))
        if _any_from(logits, start, stop, heap[0]):
            for i in range(start, stop):
                if logits[i] > heap[0]:
                    _sift_down(heap, logits[i])
    return heap[0]


@array_function("int64(float32[::1], int32[::1], float32, float32[::1], int32[::1])")
def keep_from(logits: Any, ids: Any, threshold: Any, kept_logits: Any, kept_ids: Any) -> int:
    """Copy logits and ids that reach a threshold; returns their number.

    They go to the front of other arrays, or of the same ones. The arrays are as long as the logits: a place is written
    before it is known whether the next one is.
    """
    kept = 0
    for start in range(0, len(logits), _BLOCK):
        stop = min(start + _BLOCK, len(logits))
        if _any_from(logits, start, stop, threshold):
            for i in range(start, stop):
                kept_logits[kept], kept_ids[kept] = logits[i], ids[i]
                kept += logits[i] >= threshold
    return kept


@array_function("int64(float32[::1], int32[::1], boolean[::1], float32[::1], int32[::1])")
def keep_where(logits: Any, ids: Any, mask: Any, kept_logits: Any, kept_ids: Any) -> int:
    """Copy logits and ids selected by a mask; see `keep_from`."""
    kept = 0
    for i in range(len(logits)):
        kept_logits[kept], kept_ids[kept] = logits[i], ids[i]
        kept += mask[i]
    return kept


@array_function("float64(float32[::1], float64)")
def log_sum_exp(logits: Any, largest: float) -> float:
    """log(sum(exp(logits - largest)))."""
    total = 0.0
    for i in range(len(logits)):
        total += math.exp(np.float64(logits[i]) - largest)
    return math.log(total)


@array_function("float64(float32[::1], float64, float64)")
def entropy(logits: Any, largest: float, log_total: float) -> float:
    """Entropy in nats: the expected surprise.

    `log_total` is the logits' log_sum_exp.
    """
    expected = 0.0
    for i in range(len(logits)):
        surprise = log_total - (np.float64(logits[i]) - largest)
        p = math.exp(-surprise)
        if p > 0:
            expected += p * surprise
    return expected


@array_function("void(float32[::1], float64, float64, float64[::1])")
def softmax(logits: Any, largest: float, log_total: float, out: Any) -> None:
    """Softmax: probabilities, where `log_total` is the logits' log_sum_exp."""
    for i in range(len(logits)):
        out[i] = math.exp((np.float64(logits[i]) - largest) - log_total)


@array_function("void(float32[::1], float64, float64[::1])")
def running_sums(logits: Any, largest: float, out: Any) -> None:
    """Cumulative sums of exp(logits - largest)."""
    total = 0.0
    for i in range(len(logits)):
        total += math.exp(np.float64(logits[i]) - largest)
        out[i] = total


def falling_order(keys: Any) -> Any:
    """Indices that sort float32 keys in falling order, int32 [n].

    Among equal keys the first index is first.
    """
    bits = (keys + np.float32(0)).view(np.uint32)  # no minus zero
    if len(keys) <= _FEW:
        return np.argsort(np.where(bits >> 31, bits, bits ^ _VALUE), kind="stable").astype(np.int32)
    order, other = np.empty((2, len(keys)), np.int32)
    sort_falling(bits, order, other, np.empty(_DIGITS, np.int64))
    return order


@array_function("void(uint32[::1], int32[::1], int32[::1], int64[::1])")
def sort_falling(bits: Any, order: Any, other: Any, starts: Any) -> None:
    """Radix sort of the bits of floats in falling order, stable.

    `other` and `starts`, int64 [_DIGITS], are memory for it.
    """
    n = len(bits)
    for i in range(n):
        # Floats rise with their bits, negative ones fall; falling order is the inverse of both.
        bits[i] = bits[i] if bits[i] >> np.uint32(31) else bits[i] ^ _VALUE
        order[i] = i
    source, target = order, other
    for shift in range(0, 33, _BITS):
        starts[:] = 0
        for i in range(n):
            starts[(bits[i] >> np.uint32(shift)) & np.uint32(_DIGITS - 1)] += 1
        place = 0
        for digit in range(_DIGITS):
            place, starts[digit] = place + starts[digit], place
        for i in range(n):
            digit = (bits[source[i]] >> np.uint32(shift)) & np.uint32(_DIGITS - 1)
            target[starts[digit]] = source[i]
            starts[digit] += 1
        source, target = target, source
    for i in range(n):
        order[i] = source[i]


@array_function("float64(float32[::1])")
def deviation(logits: Any) -> float:
    """Standard deviation of the finite logits."""
    n, total = 0, 0.0
    for i in range(len(logits)):
        if np.isfinite(logits[i]):
            total += np.float64(logits[i])
            n += 1
    mean = total / max(n, 1)
    squares = 0.0
    for i in range(len(logits)):
        if np.isfinite(logits[i]):
            squares += (np.float64(logits[i]) - mean) ** 2
    return math.sqrt(squares / max(n, 1))


@array_function("void(int32[::1], int64[::1])")
def repeat_lengths(text: Any, lengths: Any) -> None:
    """Z-algorithm (Gusfield 1997): lengths of matches with the text's beginning.

    lengths[i] is the number of tokens from i on that equal those at the start of the text.
    """
    left, right = 0, 0  # the stretch that reaches furthest and equals the beginning
    for i in range(1, len(text)):
        n = min(right - i, lengths[i - left]) if i < right else 0
        while i + n < len(text) and text[n] == text[i + n]:
            n += 1
        lengths[i] = n
        if i + n > right:
            left, right = i, i + n

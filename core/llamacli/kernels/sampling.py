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

LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""

_BLOCK = 64
_BITS = 11
_DIGITS = 1 << _BITS
_VALUE = np.uint32(0x7FFFFFFF)
"""Bits of a float but for its sign."""

_FEW = 256
"""Keys that NumPy sorts as fast: counting digits takes as long for one key as for a thousand."""


# Numba's min, max, isfinite and nextafter take as long to compile as one of these functions, each.


@register_jitable
def _any_from(x: Any, start: int, stop: int, threshold: Any) -> bool:
    count = 0
    for i in range(start, stop):
        count += x[i] >= threshold
    return count > 0


@array_function("float32(float32[::1], float32[::1])")
def kth_largest(logits: Any, heap: Any) -> Any:
    """k-th largest logit; `heap` is scratch of length k."""
    return _kth_largest(logits, len(logits), heap, len(heap))


@register_jitable
def _kth_largest(logits: Any, n: int, heap: Any, k: int) -> Any:
    for i in range(k):
        heap[i] = -np.inf
    for start in range(0, n, _BLOCK):
        stop = start + _BLOCK if start + _BLOCK < n else n
        if _any_from(logits, start, stop, heap[0]):
            for i in range(start, stop):
                if logits[i] > heap[0]:  # replace the root of the min-heap
                    at, child = 0, 1
                    while child < k:
                        if child + 1 < k and heap[child + 1] < heap[child]:
                            child += 1
                        if heap[child] >= logits[i]:
                            break
                        heap[at] = heap[child]
                        at, child = child, 2 * child + 1
                    heap[at] = logits[i]
    return heap[0]


@register_jitable
def _keep_from(logits: Any, ids: Any, n: int, threshold: Any, kept_logits: Any, kept_ids: Any) -> int:
    """Copy logits and ids that reach a threshold; returns their number.

    They go to the front of other arrays, or of the same ones. The arrays are as long as the logits: a place is written
    before it is known whether the next one is. The threshold is clipped to finite float32.
    """
    threshold = LARGEST if threshold > LARGEST else -LARGEST if threshold < -LARGEST else threshold
    near, kept = np.float32(threshold), 0
    for start in range(0, n, _BLOCK):
        stop = start + _BLOCK if start + _BLOCK < n else n
        if _any_from(logits, start, stop, near):
            for i in range(start, stop):
                kept_logits[kept], kept_ids[kept] = logits[i], ids[i]
                kept += np.float64(logits[i]) >= threshold
    return kept


@array_function("int64(float32[::1], int32[::1], boolean[::1], float32[::1], int32[::1])")
def keep_where(logits: Any, ids: Any, mask: Any, kept_logits: Any, kept_ids: Any) -> int:
    """Copy logits and ids selected by a mask; see `_keep_from`."""
    kept = 0
    for i in range(len(logits)):
        kept_logits[kept], kept_ids[kept] = logits[i], ids[i]
        kept += mask[i]
    return kept


@array_function("float64(float32[::1], float64)")
def log_sum_exp(logits: Any, largest: float) -> float:
    """log(sum(exp(logits - largest)))."""
    return _log_sum_exp(logits, len(logits), largest)


@register_jitable
def _log_sum_exp(logits: Any, n: int, largest: float) -> float:
    total = 0.0
    for i in range(n):
        total += math.exp(np.float64(logits[i]) - largest)
    return math.log(total)


@array_function("float64(float32[::1], float64, float64)")
def entropy(logits: Any, largest: float, log_total: float) -> float:
    """Entropy in nats; `log_total` is the logits' log_sum_exp."""
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


def falling_order(keys: Any) -> Any:
    """Indices that sort float32 keys in falling order, int32 [n], stable."""
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


@register_jitable
def _first_largest(x: Any, n: int) -> int:
    """Index of the first largest number, or of a NaN."""
    best = 0
    for start in range(0, n, _BLOCK):
        stop, count = start + _BLOCK if start + _BLOCK < n else n, 0
        for i in range(start, stop):
            count += not x[i] <= x[best]
        if count:
            for i in range(start, stop):
                if not x[i] <= x[best]:
                    best = i
                    if x[i] != x[i]:
                        return best
    return best


@register_jitable
def _nucleus(logits: Any, ids: Any, n: int, p: float, largest: float, total: float, heap: Any, marks: Any) -> int:
    """Keep the nucleus of probability p in place; its size.

    Tokens are taken from a heap whose root is the first of the most probable. The sum is compared as float32.
    """
    for i in range(n):
        heap[i], marks[i] = i, 0
    left, reached, start = n, 0.0, n // 2 - 1
    while left:
        token = heap[left - 1] if start < 0 else heap[start]
        if start < 0:  # the heap is built: take its root
            left -= 1
            marks[heap[0]] = 1
            reached += math.exp(np.float64(logits[heap[0]]) - largest - total)
            if np.float32(reached) >= np.float32(p):
                break
        at = start if start > 0 else 0
        child = 2 * at + 1
        while child < left:
            x = logits[heap[child]]
            if child + 1 < left:
                y = logits[heap[child + 1]]
                if y > x or (y == x and heap[child + 1] < heap[child]):
                    child, x = child + 1, y
            if x < logits[token] or (x == logits[token] and token < heap[child]):
                break
            heap[at] = heap[child]
            at, child = child, 2 * child + 1
        heap[at] = token
        start -= start >= 0
    kept = 0
    for i in range(n):
        if marks[i]:
            logits[kept], ids[kept] = logits[i], ids[i]
            kept += 1
    return kept


@register_jitable
def _pick(logits: Any, n: int, largest: float, uniform: float, sums: Any) -> int:
    """Index drawn by probability; one of probability 0 never is."""
    total = 0.0
    for i in range(n):
        total += math.exp(np.float64(logits[i]) - largest)
        sums[i] = total
    aim = uniform * total
    first, last = 0, n - 1  # the first sum beyond the aim; where rounding leaves none, the first equal to all
    while first < last:
        middle = (first + last) // 2
        if sums[middle] > aim or not sums[middle] < total:
            last = middle
        else:
            first = middle + 1
    return first


TEMPERATURE, TOP_K, TOP_P, NEAR_LARGEST, KEEP_FROM, GREEDY, DRAW = range(7)
"""Steps of `apply_steps`, each with a value."""

N, KEPT, UNIFORM, N_STEPS, STEPS = range(5)
"""Places in the `numbers` of `apply_steps`: the number of candidates; 1 if they are in the kept arrays; a random number
from 0 to 1, afterwards the index of the candidate drawn, or -1; the number of steps; then kind and value of each."""


@array_function(
    "void(float64[::1], float32[::1], int32[::1], float32[::1], int32[::1], float32[::1], int32[::1], float64[::1])"
)
def apply_steps(
    numbers: Any, logits: Any, ids: Any, kept_logits: Any, kept_ids: Any, scratch: Any, order: Any, sums: Any
) -> None:
    """Apply samplers to candidates.

    `logits` and `ids` are all tokens, and are not shortened: candidates that are left go to the kept arrays. The last
    three arrays are scratch. No candidate is left of logits that are not finite.
    """
    n, index, x, names = int(numbers[N]), -1, logits, ids
    if numbers[KEPT]:
        x, names = kept_logits, kept_ids
    for step in range(int(numbers[N_STEPS])):
        kind, value = int(numbers[STEPS + 2 * step]), numbers[STEPS + 2 * step + 1]
        best = _first_largest(x, n)
        largest, threshold, total = np.float64(x[best]), -np.inf, 0.0
        if kind == GREEDY:
            index = best
        elif kind == DRAW:
            index = _pick(x, n, largest, numbers[UNIFORM], sums) if abs(largest) <= LARGEST else best
        elif kind == TEMPERATURE:
            divisor, highest = np.float32(value if value < LARGEST else LARGEST), x[best]
            if divisor > 0:
                for i in range(n):
                    x[i] = x[i] / divisor
            if divisor <= 0 or (abs(largest) <= LARGEST and abs(x[best]) > LARGEST):  # float32 overflows: one is left
                kept_ids[0], kept_logits[0] = names[best], highest
                numbers[KEPT], n, x, names = 1, 1, kept_logits, kept_ids
        elif kind == TOP_K:
            if 0 < value < n:
                threshold = np.float64(_kth_largest(x, n, scratch, int(value)))
        elif kind == TOP_P:
            if value < 1:
                # Tokens below a share of (1 - p) / n sum to less than 1 - p, so the others reach p without them.
                total = _log_sum_exp(x, n, largest)
                share = total + math.log((1 - value) / (2 * n))
                threshold = largest + (share if share < 0 else 0.0)
        else:
            threshold = value + (largest if kind == NEAR_LARGEST else 0.0)
        if threshold != -np.inf:
            n = _keep_from(x, names, n, threshold, kept_logits, kept_ids)
            numbers[KEPT], x, names = 1, kept_logits, kept_ids
            if kind == TOP_P:
                n = _nucleus(x, names, n, value, largest, total, order, scratch)
        if not n or index >= 0:
            break
    numbers[N], numbers[UNIFORM] = n, index


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

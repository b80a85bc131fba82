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
DIGITS = 1 << _BITS
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
    return _kth_largest(logits, heap)


@register_jitable
def _kth_largest(logits: Any, heap: Any) -> Any:
    heap[:] = -np.inf
    for start in range(0, len(logits), _BLOCK):
        stop = min(start + _BLOCK, len(logits))
        if _any_from(logits, start, stop, heap[0]):
            for i in range(start, stop):
                if logits[i] > heap[0]:
                    _sift_down(heap, logits[i])
    return heap[0]


@register_jitable
def _keep_from(logits: Any, ids: Any, threshold: float, kept_logits: Any, kept_ids: Any) -> int:
    """Copy logits and ids that reach a threshold; returns their number.

    They go to the front of other arrays, or of the same ones. The arrays are as long as the logits: a place is written
    before it is known whether the next one is. The threshold is clipped to finite float32 and rounded up.
    """
    least = np.float32(max(min(threshold, LARGEST), -LARGEST))
    if np.float64(least) < threshold:
        least = np.nextafter(least, np.float32(np.inf))
    kept = 0
    for start in range(0, len(logits), _BLOCK):
        stop = min(start + _BLOCK, len(logits))
        if _any_from(logits, start, stop, least):
            for i in range(start, stop):
                kept_logits[kept], kept_ids[kept] = logits[i], ids[i]
                kept += logits[i] >= least
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
    return _log_sum_exp(logits, largest)


@register_jitable
def _log_sum_exp(logits: Any, largest: float) -> float:
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


def falling_order(keys: Any) -> Any:
    """Indices that sort float32 keys in falling order, int32 [n].

    Among equal keys the first index is first.
    """
    bits = (keys + np.float32(0)).view(np.uint32)  # no minus zero
    if len(keys) <= _FEW:
        return np.argsort(np.where(bits >> 31, bits, bits ^ _VALUE), kind="stable").astype(np.int32)
    order, other = np.empty((2, len(keys)), np.int32)
    sort_falling(bits, order, other, np.empty(DIGITS, np.int64))
    return order


@array_function("void(uint32[::1], int32[::1], int32[::1], int64[::1])")
def sort_falling(bits: Any, order: Any, other: Any, starts: Any) -> None:
    """Radix sort of the bits of floats in falling order, stable.

    `other` and `starts`, int64 [DIGITS], are memory for it.
    """
    _sort_falling(bits, order, other, starts)


@register_jitable
def _sort_falling(bits: Any, order: Any, other: Any, starts: Any) -> None:
    n = len(bits)
    for i in range(n):
        # Floats rise with their bits, negative ones fall; falling order is the inverse of both.
        bits[i] = bits[i] if bits[i] >> np.uint32(31) else bits[i] ^ _VALUE
        order[i] = i
    source, target = order, other
    for shift in range(0, 33, _BITS):
        starts[:] = 0
        for i in range(n):
            starts[(bits[i] >> np.uint32(shift)) & np.uint32(DIGITS - 1)] += 1
        place = 0
        for digit in range(DIGITS):
            place, starts[digit] = place + starts[digit], place
        for i in range(n):
            digit = (bits[source[i]] >> np.uint32(shift)) & np.uint32(DIGITS - 1)
            target[starts[digit]] = source[i]
            starts[digit] += 1
        source, target = target, source
    for i in range(n):
        order[i] = source[i]


@register_jitable
def _deviation(logits: Any) -> float:
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
def _first_largest(x: Any) -> int:
    """Index of the first largest number, or of a NaN."""
    best = 0
    for start in range(0, len(x), _BLOCK):
        stop, count = min(start + _BLOCK, len(x)), 0
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
def _nucleus(logits: Any, ids: Any, p: float, largest: float, total: float, bits: Any, order: Any, starts: Any) -> int:
    """Keep the nucleus of probability p in place; its size.

    `bits`: those of the logits. The sum of probabilities is compared as float32.
    """
    n = len(logits)
    if n <= _FEW:
        for i in range(n):  # insertion: stable, and falling
            j = i
            while j > 0 and logits[order[0, j - 1]] < logits[i]:
                order[0, j] = order[0, j - 1]
                j -= 1
            order[0, j] = i
    else:
        for i in range(n):
            bits[i] = bits[i] if logits[i] else np.uint32(0)  # no minus zero
        _sort_falling(bits, order[0, :n], order[1, :n], starts)
    n_kept, reached = 0, 0.0
    while n_kept < n and np.float32(reached) < np.float32(p):
        reached += math.exp(np.float64(logits[order[0, n_kept]]) - largest - total)
        n_kept += 1
    for i in range(n):
        bits[i] = 0
    for i in range(max(1, n_kept)):
        bits[order[0, i]] = 1
    kept = 0
    for i in range(n):
        if bits[i]:
            logits[kept], ids[kept] = logits[i], ids[i]
            kept += 1
    return kept


@register_jitable
def _pick(logits: Any, largest: float, uniform: float, sums: Any) -> int:
    """Index drawn by probability; one of probability 0 never is."""
    total = 0.0
    for i in range(len(logits)):
        total += math.exp(np.float64(logits[i]) - largest)
        sums[i] = total
    aim = uniform * total
    first, last = 0, len(logits) - 1  # the first sum beyond the aim; where rounding leaves none, the first equal to all
    while first < last:
        middle = (first + last) // 2
        if sums[middle] > aim or not sums[middle] < total:
            last = middle
        else:
            first = middle + 1
    return first


TEMPERATURE, TOP_K, TOP_P, NEAR_LARGEST, DEVIATIONS, KEEP_FROM, GREEDY, DRAW = range(8)
"""Steps of `apply_steps`, each with a value."""

N, KEPT, UNIFORM, N_STEPS, STEPS = range(5)
"""Places in the `numbers` of `apply_steps`: the number of candidates; 1 if they are in the kept arrays; a random number
from 0 to 1, afterwards the index of the candidate drawn, or -1; the number of steps; then kind and value of each."""


@array_function(
    "void(float64[::1], float32[::1], int32[::1], float32[::1], int32[::1], uint32[::1], uint32[::1], float32[::1], "
    "int32[:, ::1], int64[::1], float64[::1])"
)
def apply_steps(
    numbers: Any, logits: Any, ids: Any, kept_logits: Any, kept_ids: Any, kept_bits: Any, bits: Any, heap: Any,
    order: Any, starts: Any, sums: Any,
) -> None:  # fmt: skip
    """Apply samplers to candidates.

    `logits` and `ids` are all tokens, and are not shortened: candidates that are left go to the kept arrays, of which
    `kept_bits` is another view. All other arrays are scratch. No candidate is left of logits that are not finite.
    """
    n, index = int(numbers[N]), -1
    if numbers[KEPT]:
        x, names = kept_logits[:n], kept_ids[:n]
    else:
        x, names = logits[:n], ids[:n]
    for step in range(int(numbers[N_STEPS])):
        if not len(x):
            break
        kind, value = int(numbers[STEPS + 2 * step]), numbers[STEPS + 2 * step + 1]
        best = _first_largest(x)
        largest = np.float64(x[best])
        threshold, total, n = -np.inf, 0.0, len(x)
        if kind == GREEDY:
            index = best
            break
        if kind == DRAW:
            index = _pick(x, largest, numbers[UNIFORM], sums) if np.isfinite(largest) else best
            break
        if kind == TEMPERATURE:
            divisor, highest = np.float32(min(value, LARGEST)), x[best]
            if divisor > 0:
                for i in range(n):
                    x[i] = x[i] / divisor
            if divisor <= 0 or (np.isfinite(highest) and np.isinf(x[best])):  # float32 overflows: one token is left
                kept_ids[0], kept_logits[0] = names[best], highest
                numbers[KEPT], x, names = 1, kept_logits[:1], kept_ids[:1]
            continue
        if kind == TOP_K:
            if 0 < value < n:
                threshold = np.float64(_kth_largest(x, heap[: int(value)]))
        elif kind == TOP_P:
            if value < 1:
                # Tokens below a share of (1 - p) / n sum to less than 1 - p, so the others reach p without them.
                total = _log_sum_exp(x, largest)
                threshold = largest + min(total + math.log((1 - value) / (2 * n)), 0.0)
        elif kind == NEAR_LARGEST:
            threshold = largest + value
        elif kind == DEVIATIONS:
            threshold = largest - value * _deviation(x) if value > 0 else -np.inf
        else:
            threshold = value
        if threshold != -np.inf:
            n = _keep_from(x, names, threshold, kept_logits, kept_ids)
            numbers[KEPT], x, names = 1, kept_logits[:n], kept_ids[:n]
            if kind == TOP_P and n:
                for i in range(n):
                    bits[i] = kept_bits[i]
                n = _nucleus(x, names, value, largest, total, bits[:n], order, starts)
                x, names = kept_logits[:n], kept_ids[:n]
    numbers[N], numbers[UNIFORM] = len(x), index


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

"""Mixture-of-experts kernels: top-k routing, sorting by expert, combining.

Work is sorted by expert so that each one's weights are read once. Every token has `n_used` slots, one for each expert
that it is given to. Slots are numbered by expert, then token; the products of all slots of an expert are one matrix
product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import kernel
from llamacli.kernels.layout import ROW, RUN, record
from llamacli.kernels.work import share

ROUTE = record(
    "router", "stride", "scratch", "n_expert", "n_used", "shared_by", "scoring", "bias", "n_groups", "n_groups_used",
    "renormalize", "scale", "by_token", "chosen", "weights", weight_scale=np.float32,
)  # fmt: skip
"""`scratch` is float32 [n_rows, 3 * n_expert]. Writes for each row: `chosen`, int64 [n_used], the experts, best first,
and `weights`, float32 [n_used], times each expert's `scale`, float32 [n_expert], if that is not 0. `bias`,
float32 [n_expert], is added for the choice alone, if it is not 0. Of `n_expert` scores, `shared_by` neighbours choose
one expert, whose weight is the score of its number. `scoring` is a number of `Scoring`, ops/moe.py. `by_token`,
float32 [n_vocab, n_used], are the experts of tokens that have an id, if it is not 0."""

SORT = record("chosen", "n_expert", "n_used", "starts", "slots", "rows")
"""Writes `starts`, int64 [n_expert + 1], `slots`, int64 [n_rows, n_used], and `rows`, int64 [n_slots]."""

GATHER = record("x", "out", "stride", "rows", "n_used")
COMBINE = record("x", "x_stride", "out", "out_stride", "width", "slots", "weights", "n_used")

RESCALE = record("x", "x_stride", "out", "out_stride", "width", "starts", "n_expert", "scale", "bias", "bias_stride")
"""out = scale[e] * x + bias[e] for the slots starts[e] to starts[e + 1] - 1 of each expert e."""

WEIGH = record("x", "x_stride", "out", "out_stride", "width", "slots", "weights", "n_used")

_LEAST = np.float32(2**-14)  # GGML's floor of the sum of weights, the smallest normal float16
_EXCLUDED = np.float32(-np.inf)


@njit(inline="always")
def _scores(scoring: Any, logits: Any, p: Any) -> Any:
    if scoring == 1:
        top = logits[0]
        for e in range(1, len(logits)):
            top = max(top, logits[e])
        total = np.float32(0)
        for e in range(len(logits)):
            p[e] = np.exp(logits[e] - top)
            total += p[e]
        return total
    for e in range(len(logits)):
        z = logits[e]
        if scoring == 2:
            p[e] = np.float32(1) / (np.float32(1) + np.exp(-z))
        elif scoring == 3:
            p[e] = z
        else:
            p[e] = np.sqrt(z if z > np.float32(20) else np.log(np.float32(1) + np.exp(z)))
    return np.float32(1)


@njit(inline="always")
def _exclude_groups(score: Any, group_score: Any, n_groups: Any, n_used: Any) -> None:
    """Exclude all but the groups of the best two scores' sum."""
    size = len(score) // n_groups
    for group in range(n_groups):
        first = second = _EXCLUDED
        for e in range(group * size, (group + 1) * size):
            if score[e] > first:
                first, second = score[e], first
            elif score[e] > second:
                second = score[e]
        group_score[group] = first + second
    for _ in range(n_groups - n_used):
        worst = -1
        for group in range(n_groups):  # the last of equals: the first ones are kept
            if group_score[group] < np.float32(np.inf) and (worst < 0 or group_score[group] <= group_score[worst]):
                worst = group
        group_score[worst] = np.float32(np.inf)
        for e in range(worst * size, (worst + 1) * size):
            score[e] = _EXCLUDED


@njit(inline="always")
def _softmax(x: Any) -> None:
    top = x[0]
    for i in range(1, len(x)):
        top = max(top, x[i])
    total = np.float32(0)
    for i in range(len(x)):
        x[i] = np.exp(x[i] - top)
        total += x[i]
    for i in range(len(x)):
        x[i] /= total


@kernel
def route(args: int, run: int, thread: int, n_threads: int) -> None:
    """Scores of the router's logits and top-k selection.

    Chooses the `n_used` largest, the first of equals first. A row is a unit of work.
    """
    a, r = carray(simd.pointer(args), 1, ROUTE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share(r.n_rows - r.first_row, thread, n_threads)
    tokens = carray(simd.pointer(r.rows), r.n_rows, ROW)
    for row in range(r.first_row + first, r.first_row + last):
        token = tokens[row].token if a.by_token and not tokens[row].given else -1
        logits = carray(simd.pointer(a.router + row * a.stride), a.n_expert, np.float32)
        scratch = a.scratch + 12 * row * a.n_expert
        p = carray(simd.pointer(scratch), a.n_expert, np.float32)
        score = carray(simd.pointer(scratch + 4 * a.n_expert), a.n_expert, np.float32)
        group_score = carray(simd.pointer(scratch + 8 * a.n_expert), a.n_expert, np.float32)
        chosen = carray(simd.pointer(a.chosen + 8 * row * a.n_used), a.n_used, np.int64)
        weights = carray(simd.pointer(a.weights + 4 * row * a.n_used), a.n_used, np.float32)
        total = _scores(a.scoring, logits, p)
        for e in range(a.n_expert):
            score[e] = p[e] / total + simd.read_f32(a.bias + 4 * e) if a.bias else p[e]
        if a.n_groups > 1:
            _exclude_groups(score, group_score, a.n_groups, a.n_groups_used)
        for rank in range(a.n_used):
            best = 0
            for e in range(1, a.n_expert):
                if score[e] > score[best]:
                    best = e
            expert = best // a.shared_by
            if token >= 0:
                expert = np.int64(simd.read_f32(a.by_token + 4 * (token * a.n_used + rank)))
            chosen[rank], weights[rank] = expert, p[expert] / total
            score[best] = _EXCLUDED
        if a.scoring == 3:
            _softmax(weights)
        kept = np.float32(0)
        for rank in range(a.n_used):
            kept += weights[rank]
        if a.renormalize:
            kept = max(kept, _LEAST)
            for rank in range(a.n_used):
                weights[rank] /= kept
        if a.weight_scale != np.float32(1):
            for rank in range(a.n_used):
                weights[rank] *= a.weight_scale
        if a.scale:
            for rank in range(a.n_used):
                weights[rank] *= simd.read_f32(a.scale + 4 * chosen[rank])


@kernel
def sort(args: int, run: int, thread: int, n_threads: int) -> None:
    """Number the slots by expert: a counting sort by one thread."""
    a, r = carray(simd.pointer(args), 1, SORT)[0], carray(simd.pointer(run), 1, RUN)[0]
    if thread > 0:
        return
    n_rows = r.n_rows - r.first_row
    chosen = carray(simd.pointer(a.chosen + 8 * r.first_row * a.n_used), n_rows * a.n_used, np.int64)
    slots = carray(simd.pointer(a.slots + 8 * r.first_row * a.n_used), n_rows * a.n_used, np.int64)
    starts = carray(simd.pointer(a.starts), a.n_expert + 1, np.int64)
    rows = carray(simd.pointer(a.rows), n_rows * a.n_used, np.int64)
    for e in range(a.n_expert + 1):
        starts[e] = 0
    for i in range(len(chosen)):
        starts[chosen[i] + 1] += 1
    for e in range(a.n_expert):
        starts[e + 1] += starts[e]
    for i in range(len(chosen)):
        slot = starts[chosen[i]]
        starts[chosen[i]] += 1
        slots[i], rows[slot] = slot, r.first_row + i // a.n_used
    for e in range(a.n_expert, 0, -1):  # filling moved each start to the next one's place
        starts[e] = starts[e - 1]
    starts[0] = 0


@kernel
def gather(args: int, run: int, thread: int, n_threads: int) -> None:
    """Copy rows of activations to their slots, units of work."""
    a, r = carray(simd.pointer(args), 1, GATHER)[0], carray(simd.pointer(run), 1, RUN)[0]
    n_slots = (r.n_rows - r.first_row) * a.n_used
    first, last = share(n_slots, thread, n_threads)
    rows = carray(simd.pointer(a.rows), n_slots, np.int64)
    for slot in range(first, last):
        source = carray(simd.pointer(a.x + rows[slot] * a.stride), a.stride, np.uint8)
        target = carray(simd.pointer(a.out + slot * a.stride), a.stride, np.uint8)
        for i in range(a.stride):
            target[i] = source[i]


@kernel
def weigh(args: int, run: int, thread: int, n_threads: int) -> None:
    """Multiply rows (units of work) by their experts' weights, into slots."""
    a, r = carray(simd.pointer(args), 1, WEIGH)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share(r.n_rows - r.first_row, thread, n_threads)
    for row in range(r.first_row + first, r.first_row + last):
        slots = carray(simd.pointer(a.slots + 8 * row * a.n_used), a.n_used, np.int64)
        weights = carray(simd.pointer(a.weights + 4 * row * a.n_used), a.n_used, np.float32)
        for rank in range(a.n_used):
            weight, out = simd.splat(weights[rank]), a.out + slots[rank] * a.out_stride
            for at in range(0, 4 * a.width, 4 * ir.LANES):
                simd.store(out + at, simd.mul(simd.load(a.x + row * a.x_stride + at), weight))


@kernel
def combine(args: int, run: int, thread: int, n_threads: int) -> None:
    """Weighted sum of a row's slots, the most probable expert first."""
    a, r = carray(simd.pointer(args), 1, COMBINE)[0], carray(simd.pointer(run), 1, RUN)[0]
    first, last = share(r.n_rows - r.first_row, thread, n_threads)
    for row in range(r.first_row + first, r.first_row + last):
        slots = carray(simd.pointer(a.slots + 8 * row * a.n_used), a.n_used, np.int64)
        weights = carray(simd.pointer(a.weights + 4 * row * a.n_used), a.n_used, np.float32)
        for at in range(0, 4 * a.width, 4 * ir.LANES):
            total = simd.mul(simd.splat(weights[0]), simd.load(a.x + slots[0] * a.x_stride + at))
            for rank in range(1, a.n_used):
                x = simd.load(a.x + slots[rank] * a.x_stride + at)
                total = simd.add(total, simd.mul(simd.splat(weights[rank]), x))
            simd.store(a.out + row * a.out_stride + at, total)


@kernel
def rescale(args: int, run: int, thread: int, n_threads: int) -> None:
    """Scale each expert's products, add its bias; unit of work: a slot."""
    a = carray(simd.pointer(args), 1, RESCALE)[0]
    starts = carray(simd.pointer(a.starts), a.n_expert + 1, np.int64)
    first, last = share(starts[a.n_expert], thread, n_threads)
    for e in range(a.n_expert):
        factor, bias = simd.splat(simd.read_f32(a.scale + 4 * e)), a.bias + e * a.bias_stride
        for slot in range(max(first, starts[e]), min(last, starts[e + 1])):
            for at in range(0, 4 * a.width, 4 * ir.LANES):
                scaled = simd.mul(simd.load(a.x + slot * a.x_stride + at), factor)
                simd.store(a.out + slot * a.out_stride + at, simd.add(scaled, simd.load(bias + at)))

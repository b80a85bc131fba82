"""Groups of numbers in SIMD lanes, and sums over blocks of groups.

Quantizers process sixteen groups side by side, one in each vector lane: row i of a matrix [size, 16] holds the i-th
number of each. Some neighbouring groups form a block. `row` is the address of a row for exchange between lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, njit, types
from llamacli.kernels.work import share

LANES, ROW = ir.LANES, 4 * ir.LANES
LARGE, TINY = 3e38, 1e-30

_LEAST_WEIGHT = 1e-6
"""Lower bound of weights beside a mean of 1, so that every number still has some."""


def group_weights(weights: npt.NDArray[np.float32] | None, size: int) -> npt.NDArray[np.float32]:
    """Weights of a row's groups, scaled to a mean of 1.

    Returns float32 [n_groups, size]. Those of a row, [n_columns], are finite and not negative; None, or all zeros,
    stand for equal weights.
    """
    if weights is None or not weights.any():
        return np.ones((1, size), np.float32)
    exact = weights.astype(np.float64)
    scaled = np.maximum(exact / exact.mean(), _LEAST_WEIGHT)
    return np.ascontiguousarray(scaled.reshape(-1, size), np.float32)


def stack_rows(n: int) -> Any:
    """Function that returns the address of `n` stack rows, whole cache lines."""

    def rows(b: ir.Builder) -> ir.Value:
        return ir.stack(b, n * ROW)

    return ir.expose(types.int64)(rows)


@njit
def splat(x: Any) -> Any:
    """Broadcast a number, as float32, to every lane."""
    return simd.splat(np.float32(x))


@njit
def ratio(x: Any, y: Any, otherwise: Any) -> Any:
    """x / y where y > 1e-30, else `otherwise`."""
    return simd.where_less(splat(TINY), y, simd.div(x, y), otherwise)


@njit
def inverse(x: Any) -> Any:
    """1 / x, or 0 where |x| is below 1e-30."""
    return simd.where_less(splat(TINY), simd.absolute(x), simd.div(splat(1), x), splat(0))


@njit
def round_clamped(x: Any, low: Any, high: Any) -> Any:
    """Nearest integer within a range."""
    return simd.maximum(simd.minimum(simd.rint(x), splat(high)), splat(low))


@njit
def extremes(a: Any, x: Any) -> Any:
    """Smallest and largest number of each group, whose rows begin at x."""
    lowest = highest = simd.load(x)
    for place in range(x + ROW, x + a.size * ROW, ROW):
        number = simd.load(place)
        lowest, highest = simd.minimum(lowest, number), simd.maximum(highest, number)
    return lowest, highest


@njit
def block_sums(groups: Any, row: Any, values: Any) -> Any:
    """Sum over the lanes of each block, in each of its lanes."""
    lanes = carray(simd.pointer(row), LANES, np.float32)
    simd.store(row, values)
    for start in range(0, LANES, groups):
        total = np.float32(0)
        for lane in range(start, start + groups):
            total += lanes[lane]
        lanes[start : start + groups] = total
    return simd.load(row)


@njit
def block_extremes(groups: Any, row: Any, values: Any) -> Any:
    """Value of largest magnitude in each block, in each of its lanes."""
    lanes = carray(simd.pointer(row), LANES, np.float32)
    simd.store(row, values)
    for start in range(0, LANES, groups):
        extreme = lanes[start]
        for lane in range(start + 1, start + groups):
            extreme = lanes[lane] if abs(lanes[lane]) > abs(extreme) else extreme
        lanes[start : start + groups] = extreme
    return simd.load(row)


@njit
def units(n_groups: Any, thread: Any, n_threads: Any) -> Any:
    """First groups of this thread's units of work, 16 groups each."""
    first, last = share((n_groups + LANES - 1) // LANES, thread, n_threads)
    return range(first * LANES, last * LANES, LANES)


@njit
def read_groups(a: Any, first: Any, x: Any, w: Any) -> None:
    """Load 16 groups and their weights from group `first` on.

    Missing groups are filled with 0 and the weight 1. `a.weights` is float32 [a.row_groups, size], and belongs to every
    row of as many groups.
    """
    size = a.size
    numbers = carray(simd.pointer(x), (size, LANES), np.float32)
    weights = carray(simd.pointer(w), (size, LANES), np.float32)
    for lane in range(LANES):
        group = first + lane
        if group < a.n_groups:
            source = carray(simd.pointer(a.x + 4 * group * size), size, np.float32)
            weight = carray(simd.pointer(a.weights + 4 * (group % a.row_groups) * size), size, np.float32)
            for i in range(size):
                numbers[i, lane] = source[i]
                weights[i, lane] = weight[i]
        else:
            numbers[:size, lane] = 0
            weights[:size, lane] = 1

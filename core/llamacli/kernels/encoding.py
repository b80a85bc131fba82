"""Quantization: codes and scales of least squared error, which may be weighted.

Block structures are given by formats; see `llamacli.quantization.blocks`. Sixteen groups are processed side by side,
one in each vector lane, so that a search reads as if it were for one. Results do not depend on the CPU or on the number
of threads.

A group's scale (and shift) is first searched alone: several grids are laid over the range of its numbers, and each is
fitted by least squares to the codes that it gives. Where several groups form a block, the block's factors and the
groups' integers are then fitted alternately, from several starts, always judged by the squared error of the numbers
themselves.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.kernels import simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.groups import (
    LANES,
    LARGE,
    ROW,
    block_extremes,
    block_sums,
    extremes,
    group_weights,
    inverse,
    ratio,
    read_groups,
    round_clamped,
    splat,
    stack_rows,
    units,
)
from llamacli.kernels.jit import kernel
from llamacli.kernels.layout import record
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import BlockFormat, Blocks

ENCODE = record(
    "x", "weights", "row_groups", "n_groups", "size", "groups", "codes", "scales", "shifts", "factors", "shift_factors",
    **dict.fromkeys(("low", "high", "scale_low", "scale_high"), np.float32),
)  # fmt: skip
"""`x` is float32 [n_groups, size], `weights` are those of `read_groups`; other fields are of BlockFormat and Blocks."""

_LONGEST = 32
"""Numbers of the longest group. Their rows of lanes are followed by those of weights, and a row for exchange."""

_WEIGHTS, _EXCHANGE = _LONGEST * ROW, 2 * _LONGEST * ROW
_memory = stack_rows(2 * _LONGEST + 1)

_CLIPS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)
"""Distances, in codes, of a group's largest number from the last code. With 0 among them, numbers that a plain
grid holds exactly stay what they are."""

_ENDS = (-0.4, -0.2, 0.0, 0.3, 0.6, 0.9)
"""Distances, in codes, by which each end of a group's range may be clipped, where there is a shift."""

_STRETCHES = (0.86, 0.92, 0.97, 1.02, 1.07)
"""Shares of the integers' range that the largest scale of a block may take."""

_FIT_ROUNDS = 2
"""Rounds of alternating fits of factors and integers."""


def encode(
    team: Team, fmt: BlockFormat, x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None = None
) -> Blocks:
    """Quantize float32 [...] to blocks of a format.

    Numbers are finite and at most 65504 in magnitude. `weights` are those of the squared errors in a row, float32
    [n_columns], see `group_weights`. Raises InvalidRequestError unless the numbers fill whole blocks.
    """
    x, weights = np.ascontiguousarray(x, np.float32), group_weights(weights, fmt.size)
    block = fmt.groups * fmt.size
    n_blocks = x.size // block
    if x.size % block:
        raise InvalidRequestError(f"{x.size} numbers are not a multiple of {fmt.type.name}'s block of {block}")
    blocks = Blocks(
        codes=np.empty((n_blocks, fmt.groups, fmt.size), np.uint8),
        scales=np.empty((n_blocks, fmt.groups), np.float32),
        shifts=np.empty((n_blocks, fmt.groups), np.float32),
        factors=np.empty(n_blocks, np.float32),
        shift_factors=np.empty(n_blocks, np.float32),
    )
    scale_low, scale_high = fmt.scales or (0, 0)
    run_kernel(
        team, encode_shifted if fmt.shifted else encode_scaled, ENCODE, x=x, weights=weights, row_groups=len(weights),
        n_groups=n_blocks * fmt.groups, size=fmt.size, groups=fmt.groups, low=fmt.low, high=fmt.high,
        scale_low=scale_low, scale_high=scale_high, **attrs.asdict(blocks, recurse=False),
    )  # fmt: skip
    return blocks


# --- shared by both kinds --------------------------------------------------------------------------------------------


@njit
def _code(a: Any, value: Any, by: Any) -> Any:
    return round_clamped(simd.mul(value, by), a.low, a.high)


@njit
def _error(a: Any, x: Any, scale: Any, shift: Any) -> Any:
    by, total = inverse(scale), splat(0)
    for place in range(x, x + a.size * ROW, ROW):
        value = simd.add(simd.load(place), shift)
        miss = simd.sub(value, simd.mul(scale, _code(a, value, by)))
        total = simd.fma(simd.mul(miss, simd.load(place + _WEIGHTS)), miss, total)
    return total


@njit
def _moments(a: Any, x: Any, scale: Any, shift: Any) -> Any:
    """Sums of code, code^2 and code * number of each group."""
    by, q1, q2, qx = inverse(scale), splat(0), splat(0), splat(0)
    for place in range(x, x + a.size * ROW, ROW):
        number = simd.load(place)
        q = _code(a, simd.add(number, shift), by)
        wq = simd.mul(q, simd.load(place + _WEIGHTS))
        q1, q2, qx = simd.add(q1, wq), simd.fma(wq, q, q2), simd.fma(wq, number, qx)
    return q1, q2, qx


@njit
def _weighted_sums(a: Any, x: Any) -> Any:
    total, n = splat(0), splat(0)
    for place in range(x, x + a.size * ROW, ROW):
        weight = simd.load(place + _WEIGHTS)
        total, n = simd.fma(simd.load(place), weight, total), simd.add(n, weight)
    return total, n


@njit
def _block_sums(a: Any, x: Any, values: Any) -> Any:
    return block_sums(a.groups, x + _EXCHANGE, values)


@njit
def _block_extremes(a: Any, x: Any, values: Any) -> Any:
    return block_extremes(a.groups, x + _EXCHANGE, values)


@njit
def _write(a: Any, first: Any, x: Any, scale: Any, shift: Any, factor: Any, shift_factor: Any) -> None:
    lanes, row = min(LANES, a.n_groups - first), carray(simd.pointer(x + _EXCHANGE), LANES, np.float32)
    for values, address, every in (
        (scale, a.scales, 1),
        (shift, a.shifts, 1),
        (factor, a.factors, a.groups),
        (shift_factor, a.shift_factors, a.groups),
    ):
        simd.store(x + _EXCHANGE, values)
        for lane in range(0, lanes, every):
            simd.write_f32(address + 4 * ((first + lane) // every), row[lane])
    scale, shift = simd.mul(factor, scale), simd.mul(shift_factor, shift)
    by, size = inverse(scale), a.size
    codes = carray(simd.pointer(a.codes), (a.n_groups, size), np.uint8)
    for i in range(size):
        code = _code(a, simd.add(simd.load(x + i * ROW), shift), by)
        simd.store(x + _EXCHANGE, simd.sub(code, splat(a.low)))
        for lane in range(lanes):
            codes[first + lane, i] = np.uint8(row[lane])


# --- number = scale * code -------------------------------------------------------------------------------------------


@njit
def _search_scale(a: Any, x: Any) -> Any:
    """Search the scale of each group; its extreme maps to either end."""
    lowest, highest = extremes(a, x)
    extreme = simd.where_less(highest, simd.sub(splat(0), lowest), lowest, highest)
    best, least = splat(0), splat(LARGE)
    for end in (a.low, a.high):
        for clip in _CLIPS:
            grid = simd.div(extreme, splat(end + clip if end > 0 else end - clip))
            _, q2, qx = _moments(a, x, grid, splat(0))
            scale = ratio(qx, q2, splat(0))
            if a.groups == 1:
                scale = simd.round_f16(scale)
            error = _error(a, x, scale, splat(0))
            best, least = simd.where_less(error, least, scale, best), simd.minimum(error, least)
    return best


@njit
def _choose_scale(a: Any, x: Any, factor: Any, target: Any) -> Any:
    """Integer scales of least error around target / factor, and their errors."""
    middle = simd.mul(target, inverse(factor))
    best, least = splat(0), splat(LARGE)
    for step in (0, -1, 1):
        scale = round_clamped(simd.add(middle, splat(step)), a.scale_low, a.scale_high)
        error = _error(a, x, simd.mul(factor, scale), splat(0))
        best, least = simd.where_less(error, least, scale, best), simd.minimum(error, least)
    return best, least


@njit
def _fit_factor(a: Any, x: Any, factor: Any, scale: Any) -> Any:
    _, q2, qx = _moments(a, x, simd.mul(factor, scale), splat(0))
    above = _block_sums(a, x, simd.mul(qx, scale))
    below = _block_sums(a, x, simd.mul(q2, simd.mul(scale, scale)))
    return simd.round_f16(ratio(above, below, splat(0)))


@njit
def _search_scales(a: Any, x: Any, target: Any) -> Any:
    extreme = _block_extremes(a, x, target)
    best, best_factor, least = splat(0), splat(0), splat(LARGE)
    for end in (a.scale_low, a.scale_high):
        for stretch in _STRETCHES:
            factor = simd.round_f16(simd.div(extreme, splat(end * np.float32(stretch))))
            for _ in range(_FIT_ROUNDS):
                scale, errors = _choose_scale(a, x, factor, target)
                error = _block_sums(a, x, errors)
                best = simd.where_less(error, least, scale, best)
                best_factor = simd.where_less(error, least, factor, best_factor)
                least = simd.minimum(error, least)
                factor = _fit_factor(a, x, factor, scale)
    return best, best_factor


@kernel
def encode_scaled(args: int, run: int, thread: int, n_threads: int) -> None:
    """Quantize formats without shift."""
    a = carray(simd.pointer(args), 1, ENCODE)[0]
    x = _memory()
    for first in units(a.n_groups, thread, n_threads):
        read_groups(a, first, x, x + _WEIGHTS)
        scale, factor = _search_scale(a, x), splat(1)
        if a.groups > 1:
            scale, factor = _search_scales(a, x, scale)
        _write(a, first, x, scale, splat(0), factor, splat(0))


# --- number = scale * code - shift -----------------------------------------------------------------------------------


@njit
def _fit_line(a: Any, x: Any, scale: Any, shift: Any, sums: Any) -> Any:
    """Least-squares scale and shift of each group.

    For the codes that the given scale and shift give; `sums` are those of `_weighted_sums`.
    """
    total, n = sums
    q1, q2, qx = _moments(a, x, scale, shift)
    spread = simd.sub(simd.mul(n, q2), simd.mul(q1, q1))
    slope = ratio(simd.sub(simd.mul(n, qx), simd.mul(q1, total)), spread, scale)
    shift = simd.div(simd.sub(simd.mul(slope, q1), total), n)
    if a.groups == 1:
        return simd.round_f16(slope), simd.round_f16(shift)
    # Integers are unsigned: a negative shift becomes 0, and the line goes through the origin.
    slope = simd.where_less(shift, splat(0), ratio(qx, q2, splat(0)), slope)
    return simd.maximum(slope, splat(0)), simd.maximum(shift, splat(0))


@njit
def _search_line(a: Any, x: Any) -> Any:
    """Search scale and shift of each group alone; returns its sums too."""
    lowest, highest = extremes(a, x)
    sums = _weighted_sums(a, x)
    if a.groups > 1:
        lowest = simd.minimum(lowest, splat(0))
    width = simd.div(simd.sub(highest, lowest), splat(a.high))
    best, best_shift, least = splat(0), splat(0), splat(LARGE)
    for below in _ENDS:
        bottom = simd.fma(splat(below), width, lowest)
        for above in _ENDS:
            grid = simd.mul(width, splat(1 - np.float32(below + above) / a.high))
            scale, shift = _fit_line(a, x, grid, simd.sub(splat(0), bottom), sums)
            error = _error(a, x, scale, shift)
            best = simd.where_less(error, least, scale, best)
            best_shift = simd.where_less(error, least, shift, best_shift)
            least = simd.minimum(error, least)
    return best, best_shift, sums


@njit
def _choose_line(a: Any, x: Any, factors: Any, targets: Any, sums: Any) -> Any:
    factor, shift_factor = factors
    target, target_shift = targets
    total, n = sums
    middle, inverse_shift = simd.mul(target, inverse(factor)), inverse(shift_factor)
    best, best_shift, least = splat(0), splat(0), splat(LARGE)
    for step in (0, -1, 1):
        scale = round_clamped(simd.add(middle, splat(step)), a.scale_low, a.scale_high)
        slope = simd.mul(factor, scale)
        q1, _, _ = _moments(a, x, slope, target_shift)
        exact = simd.div(simd.sub(simd.mul(slope, q1), total), n)
        for shift_step in (0, -1, 1):
            shift = simd.add(simd.mul(exact, inverse_shift), splat(shift_step))
            shift = round_clamped(shift, 0, a.scale_high)
            error = _error(a, x, slope, simd.mul(shift_factor, shift))
            best = simd.where_less(error, least, scale, best)
            best_shift = simd.where_less(error, least, shift, best_shift)
            least = simd.minimum(error, least)
    return best, best_shift, least


@njit
def _fit_factors(a: Any, x: Any, factors: Any, scale: Any, shift: Any, sums: Any) -> Any:
    """Least-squares factors, of u = scale * code and of -shift."""
    factor, shift_factor = factors
    total, n = sums
    q1, q2, qx = _moments(a, x, simd.mul(factor, scale), simd.mul(shift_factor, shift))
    uu = _block_sums(a, x, simd.mul(q2, simd.mul(scale, scale)))
    ux = _block_sums(a, x, simd.mul(qx, scale))
    us = _block_sums(a, x, simd.mul(q1, simd.mul(scale, shift)))
    ss = _block_sums(a, x, simd.mul(n, simd.mul(shift, shift)))
    sx = _block_sums(a, x, simd.mul(total, shift))
    product = simd.mul(uu, ss)
    spread = simd.sub(product, simd.mul(us, us))
    clear = simd.mul(splat(1e-6), product)
    fitted = simd.div(simd.sub(simd.mul(ux, ss), simd.mul(us, sx)), spread)
    fitted_shift = simd.div(simd.sub(simd.mul(us, ux), simd.mul(uu, sx)), spread)
    fitted = simd.where_less(clear, spread, fitted, factor)
    fitted_shift = simd.where_less(clear, spread, fitted_shift, shift_factor)
    # Without shifts there is one unknown.
    fitted = simd.where_less(splat(0), ss, fitted, ratio(ux, uu, factor))
    return simd.round_f16(fitted), simd.round_f16(simd.maximum(fitted_shift, splat(0)))


@njit
def _search_lines(a: Any, x: Any, targets: Any, sums: Any) -> Any:
    largest, largest_shift = _block_extremes(a, x, targets[0]), _block_extremes(a, x, targets[1])
    best, best_shift, best_factor, best_shift_factor = splat(0), splat(0), splat(0), splat(0)
    least = splat(LARGE)
    for stretch in _STRETCHES:
        most = splat(a.scale_high * np.float32(stretch))
        factors = simd.round_f16(simd.div(largest, most)), simd.round_f16(simd.div(largest_shift, most))
        for _ in range(_FIT_ROUNDS):
            scale, shift, errors = _choose_line(a, x, factors, targets, sums)
            error = _block_sums(a, x, errors)
            best = simd.where_less(error, least, scale, best)
            best_shift = simd.where_less(error, least, shift, best_shift)
            best_factor = simd.where_less(error, least, factors[0], best_factor)
            best_shift_factor = simd.where_less(error, least, factors[1], best_shift_factor)
            least = simd.minimum(error, least)
            factors = _fit_factors(a, x, factors, scale, shift, sums)
    return best, best_shift, best_factor, best_shift_factor


@kernel
def encode_shifted(args: int, run: int, thread: int, n_threads: int) -> None:
    """Quantize formats with a shift."""
    a = carray(simd.pointer(args), 1, ENCODE)[0]
    x = _memory()
    for first in units(a.n_groups, thread, n_threads):
        read_groups(a, first, x, x + _WEIGHTS)
        scale, shift, sums = _search_line(a, x)
        factor, shift_factor = splat(1), splat(1)
        if a.groups > 1:
            scale, shift, factor, shift_factor = _search_lines(a, x, (scale, shift), sums)
        _write(a, first, x, scale, shift, factor, shift_factor)

"""Codebook quantization (vector quantization): IQ, TQ and FP4 types.

Formats are given by codebooks; see `llamacli.quantization.codebooks`. Codes are those of least weighted squared error
for a scale: the nearest level, or the best entry of the whole grid. The cost of an entry is that of its two halves, and
there are few different halves, so their costs are computed first, and an entry costs one addition.

Scales are searched as in `llamacli.kernels.encoding`: each group alone, from several starts that least squares improve,
then the factor of a block and the integers of its groups alternately. Sixteen groups are processed side by side, one
in each vector lane. Results do not depend on the CPU or on the number of threads.
"""

from __future__ import annotations

from typing import Any

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
from llamacli.quantization import Codebook, CodebookBlocks, Multipliers

CODEBOOK = record(
    "x", "weights", "row_groups", "n_groups", "size", "groups", "codes", "shift_codes", "signs", "scales", "factors",
    "levels", "bounds", "n_levels", "pairs", "grid", "n_entries", "dim", "half_dim", "sign_kind", "shifts",
    "n_shifts", "shift_span", "allowed", "n_allowed", "n_tries", "count", "first", "step",
    "stretches", "n_stretches", unit=np.float32,
    first_try=np.float32, try_ratio=np.float32,
)  # fmt: skip
"""`x` is float32 [n_groups, size], `weights` are those of `read_groups`; `codes`, `shift_codes`, `signs`, `scales` and
`factors` are those of CodebookBlocks. `bounds` are the middles between levels, float32 [n_levels - 1]. `pairs`,
int32 [n_entries, 2], are the indices of an entry's halves among the combinations of `half_dim` levels, times 64;
`grid`, float32 [n_entries, dim], are its levels. Other fields are those of Codebook and Multipliers."""

_LONGEST, _MOST_HALVES = 256, 81
_VECTORS = 4 * ROW
"""Bytes of a vector's rows: best entry and its cost, for two shifts."""

# Rows of lanes of a thread, behind its numbers: weights, results of vectors, costs of halves, exchange.
_WEIGHTS = _LONGEST * ROW
_FOUND = 2 * _LONGEST * ROW
_COSTS = _FOUND + 8 * _VECTORS
_EXCHANGE = _COSTS + 2 * _MOST_HALVES * ROW
_memory = stack_rows(_EXCHANGE // ROW + 1)

_FIT_ROUNDS = 2
"""Rounds of alternating fits of factors and integers."""


def encode_codebook(
    team: Team, book: Codebook, x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None = None
) -> CodebookBlocks:
    """Quantize float32 [...] to groups of a codebook's format.

    Numbers are finite and within the format's range. `weights` are those of the squared errors in a row, float32
    [n_columns], see `group_weights`. Raises InvalidRequestError unless the numbers fill whole blocks.
    """
    x, weights = np.ascontiguousarray(x, np.float32), group_weights(weights, book.size)
    block = book.groups * book.size
    if x.size % block:
        raise InvalidRequestError(f"{x.size} numbers are not a multiple of {book.type.name}'s block of {block}")
    n_groups = x.size // book.size
    n_vectors = book.size // book.dim
    found = CodebookBlocks(
        codes=np.empty((n_groups, n_vectors), np.uint16),
        shifts=np.zeros((n_groups, n_vectors), np.uint8),
        signs=np.zeros((n_groups, max(1, book.size // 8)), np.uint8),
        scales=np.empty(n_groups, np.float32),
        factors=np.empty(n_groups // book.groups, np.float32),
    )
    tables, multipliers = _tables(book), book.multipliers or Multipliers(0, 1, 1)
    run_kernel(
        team, encode_groups, CODEBOOK, x=x, weights=weights, codes=found.codes, shift_codes=found.shifts,
        signs=found.signs, scales=found.scales, factors=found.factors, row_groups=len(weights), n_groups=n_groups,
        size=book.size, groups=book.groups, n_levels=len(book.levels), n_entries=len(tables["pairs"]), dim=book.dim,
        half_dim=book.dim // 2, sign_kind=book.signs, n_shifts=len(book.shifts), shift_span=book.shift_span,
        n_allowed=len(tables["allowed"]), n_stretches=len(tables["stretches"]), first_try=book.tries[0],
        try_ratio=book.tries[1], n_tries=book.tries[2], first=multipliers.first, step=multipliers.step,
        count=multipliers.count, unit=multipliers.unit, **tables,
    )  # fmt: skip
    return found


def _tables(book: Codebook) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "levels": np.ascontiguousarray(book.levels, np.float32),
        "bounds": np.array((book.levels[1:] + book.levels[:-1]) / 2, np.float32),
        "shifts": np.array(book.shifts, np.float32),
        "stretches": np.array(book.multipliers.stretches if book.multipliers else (), np.float32),
        "allowed": np.empty(0, np.float32) if book.scales is None else book.scales,
        "pairs": np.empty((0, 2), np.int32),
        "grid": np.empty((0, 1), np.float32),
    }
    if book.grid is not None:
        powers = len(book.levels) ** np.arange(book.dim // 2)
        pairs = (book.grid.reshape(len(book.grid), 2, -1) * powers).sum(axis=2)
        tables["pairs"] = np.ascontiguousarray(pairs * ROW, np.int32)
        tables["grid"] = np.ascontiguousarray(book.levels[book.grid], np.float32)
    return tables


# --- single numbers --------------------------------------------------------------------------------------------------


@njit
def _nearest(a: Any, number: Any, by: Any) -> Any:
    """Nearest level of number * by, and its index."""
    levels = carray(simd.pointer(a.levels), a.n_levels, np.float32)
    bounds = carray(simd.pointer(a.bounds), a.n_levels - 1, np.float32)
    t, level, index = simd.mul(number, by), splat(levels[0]), splat(0)
    for i in range(1, a.n_levels):
        bound = splat(bounds[i - 1])
        level, index = simd.where_less(bound, t, splat(levels[i]), level), simd.where_less(bound, t, splat(i), index)
    return level, index


@njit
def _fit_numbers(a: Any, x: Any, scale: Any) -> Any:
    """Weighted sums of q^2, q * number and squared error, for levels q."""
    by, qq, qx, error = inverse(scale), splat(0), splat(0), splat(0)
    for place in range(x, x + a.size * ROW, ROW):
        number, weight = simd.load(place), simd.load(place + _WEIGHTS)
        q, _ = _nearest(a, number, by)
        wq, miss = simd.mul(q, weight), simd.sub(number, simd.mul(scale, q))
        qq, qx = simd.fma(wq, q, qq), simd.fma(wq, number, qx)
        error = simd.fma(simd.mul(miss, weight), miss, error)
    return qq, qx, error


# --- vectors ---------------------------------------------------------------------------------------------------------


@njit
def _cost_halves(a: Any, x: Any, out: Any, scale: Any, shift: Any) -> None:
    """Weighted squared errors of all combinations of levels of half a vector."""
    levels = carray(simd.pointer(a.levels), a.n_levels, np.float32)
    simd.store(out, splat(0))
    known = 1
    for place in range(x, x + a.half_dim * ROW, ROW):
        number, weight = simd.load(place), simd.load(place + _WEIGHTS)
        for i in range(a.n_levels - 1, -1, -1):  # the first level last, since it overwrites the known costs
            miss = simd.sub(number, simd.mul(scale, splat(levels[i] + shift)))
            cost = simd.mul(simd.mul(miss, weight), miss)
            for k in range(known):
                simd.store(out + (i * known + k) * ROW, simd.add(simd.load(out + k * ROW), cost))
        known *= a.n_levels


@njit
def _best_entry(a: Any, low: Any, high: Any) -> Any:
    """Entry of least cost, with its cost.

    Four quarters of the grid are searched side by side; of equal entries the first counts.
    """
    pairs, quarter = carray(simd.pointer(a.pairs), (a.n_entries, 2), np.int32), a.n_entries // 4
    c0 = c1 = c2 = c3 = splat(LARGE)
    i0 = i1 = i2 = i3 = number = splat(0)
    for i in range(quarter):
        cost = simd.add(simd.load(low + pairs[i, 0]), simd.load(high + pairs[i, 1]))
        i0, c0 = simd.where_less(cost, c0, number, i0), simd.minimum(cost, c0)
        j = i + quarter
        cost = simd.add(simd.load(low + pairs[j, 0]), simd.load(high + pairs[j, 1]))
        i1, c1 = simd.where_less(cost, c1, number, i1), simd.minimum(cost, c1)
        j += quarter
        cost = simd.add(simd.load(low + pairs[j, 0]), simd.load(high + pairs[j, 1]))
        i2, c2 = simd.where_less(cost, c2, number, i2), simd.minimum(cost, c2)
        j += quarter
        cost = simd.add(simd.load(low + pairs[j, 0]), simd.load(high + pairs[j, 1]))
        i3, c3 = simd.where_less(cost, c3, number, i3), simd.minimum(cost, c3)
        number = simd.add(number, splat(1))
    size = splat(quarter)
    i1, i2, i3 = simd.add(i1, size), simd.fma(splat(2), size, i2), simd.fma(splat(3), size, i3)
    i0, c0 = simd.where_less(c1, c0, i1, i0), simd.minimum(c1, c0)
    i2, c2 = simd.where_less(c3, c2, i3, i2), simd.minimum(c3, c2)
    return simd.where_less(c2, c0, i2, i0), simd.minimum(c2, c0)


@njit
def _search_vectors(a: Any, x: Any, scale: Any) -> Any:
    """Squared error of each group; best entries and shifts go to rows."""
    shifts, n_vectors = carray(simd.pointer(a.shifts), a.n_shifts, np.float32), a.size // a.dim
    low, high, found = x + _COSTS, x + _COSTS + _MOST_HALVES * ROW, x + _FOUND
    first, second = splat(0), splat(0)
    for v in range(n_vectors):
        rows, place = found + v * _VECTORS, x + v * a.dim * ROW
        for i in range(a.n_shifts):
            _cost_halves(a, place, low, scale, shifts[i])
            _cost_halves(a, place + a.half_dim * ROW, high, scale, shifts[i])
            entry, cost = _best_entry(a, low, high)
            simd.store(rows + 2 * i * ROW, entry)
            simd.store(rows + (2 * i + 1) * ROW, cost)
        first = simd.add(first, simd.load(rows + ROW))
        if a.n_shifts > 1:
            second = simd.add(second, simd.load(rows + 3 * ROW))
    if a.n_shifts == 1:
        for v in range(n_vectors):
            simd.store(found + v * _VECTORS + ROW, splat(0))
        return first
    error = splat(0)
    for v in range(n_vectors):
        rows = found + v * _VECTORS
        cost, other = simd.load(rows + ROW), simd.load(rows + 3 * ROW)
        # A shift of the whole group is chosen by the group's error, one of a vector by the vector's.
        this, that = (first, second) if a.shift_span == a.size else (cost, other)
        entry = simd.where_less(that, this, simd.load(rows + 2 * ROW), simd.load(rows))
        error = simd.add(error, simd.where_less(that, this, other, cost))
        simd.store(rows, entry)
        simd.store(rows + ROW, simd.where_less(that, this, splat(1), splat(0)))
    return error


@njit
def _fit_vectors(a: Any, x: Any, scale: Any) -> Any:
    """Sums of q^2, q * number and squared error, as `_fit_numbers`."""
    error = _search_vectors(a, x, scale)
    shifts = carray(simd.pointer(a.shifts), a.n_shifts, np.float32)
    grid = carray(simd.pointer(a.grid), (a.n_entries, a.dim), np.float32)
    qq, qx = splat(0), splat(0)
    row = carray(simd.pointer(x + _EXCHANGE), LANES, np.float32)
    for v in range(a.size // a.dim):
        rows = x + _FOUND + v * _VECTORS
        entries = carray(simd.pointer(rows), LANES, np.float32)
        chosen = carray(simd.pointer(rows + ROW), LANES, np.float32)
        for i in range(a.dim):
            for lane in range(LANES):
                row[lane] = grid[np.int64(entries[lane]), i] + shifts[np.int64(chosen[lane])]
            place, q = x + (v * a.dim + i) * ROW, simd.load(x + _EXCHANGE)
            wq = simd.mul(q, simd.load(place + _WEIGHTS))
            qq, qx = simd.fma(wq, q, qq), simd.fma(wq, simd.load(place), qx)
    return qq, qx, error


@njit
def _fix_signs(a: Any, first: Any, x: Any) -> None:
    """Make numbers positive, and write their signs.

    Where only an even number of eight can be negative, the one whose sign matters least keeps the wrong one.
    """
    numbers = carray(simd.pointer(x), (a.size, LANES), np.float32)
    weights = carray(simd.pointer(x + _WEIGHTS), (a.size, LANES), np.float32)
    n_bytes = a.size // 8
    signs = carray(simd.pointer(a.signs), (a.n_groups, n_bytes), np.uint8)
    for lane in range(min(LANES, a.n_groups - first)):
        for k in range(n_bytes):
            bits, n_minus, weakest, least = 0, 0, 8 * k, np.float32(LARGE)
            for i in range(8 * k, 8 * k + 8):
                number = numbers[i, lane]
                if number < 0:
                    bits |= 1 << (i - 8 * k)
                    n_minus += 1
                    numbers[i, lane] = -number
                importance = weights[i, lane] * number * number
                if importance < least:
                    weakest, least = i, importance
            if a.sign_kind == 2 and n_minus % 2:
                bits ^= 1 << (weakest - 8 * k)
                numbers[weakest, lane] = -numbers[weakest, lane]
            signs[first + lane, k] = np.uint8(bits)


# --- scales ----------------------------------------------------------------------------------------------------------


@njit
def _fit(a: Any, x: Any, scale: Any) -> Any:
    return _fit_numbers(a, x, scale) if a.n_entries == 0 else _fit_vectors(a, x, scale)


@njit
def _error(a: Any, x: Any, scale: Any) -> Any:
    if a.n_entries == 0:
        _, _, error = _fit_numbers(a, x, scale)
        return error
    return _search_vectors(a, x, scale)


@njit
def _extreme(a: Any, x: Any) -> Any:
    lowest, highest = extremes(a, x)
    return simd.where_less(highest, simd.sub(splat(0), lowest), lowest, highest)


@njit
def _allowed(a: Any, x: Any, scale: Any, step: Any) -> Any:
    """Allowed scale nearest to |scale|, or the one `step` places from it."""
    allowed = carray(simd.pointer(a.allowed), a.n_allowed, np.float32)
    row = carray(simd.pointer(x + _EXCHANGE), LANES, np.float32)
    simd.store(x + _EXCHANGE, simd.absolute(scale))
    for lane in range(LANES):
        below, above = 0, a.n_allowed - 1
        while above - below > 1:
            middle = (below + above) // 2
            if allowed[middle] <= row[lane]:
                below = middle
            else:
                above = middle
        nearest = above if allowed[above] - row[lane] < row[lane] - allowed[below] else below
        row[lane] = allowed[min(max(nearest + step, 0), a.n_allowed - 1)]
    return simd.load(x + _EXCHANGE)


@njit
def _search_scale(a: Any, x: Any) -> Any:
    """Search the scale of each group by itself.

    The group's number of largest magnitude may map to either end of the levels, where they are not symmetric.
    """
    levels = carray(simd.pointer(a.levels), a.n_levels, np.float32)
    shifts = carray(simd.pointer(a.shifts), a.n_shifts, np.float32)
    extreme, top = _extreme(a, x), levels[a.n_levels - 1]
    is_signed = levels[0] < 0 and levels[0] != -top
    if not is_signed:
        extreme = simd.absolute(extreme)
    best, least = splat(0), splat(LARGE)
    for k in range(2 if is_signed else 1):
        end, quotient = (levels[0] if k else top) + shifts[0], a.first_try
        for _ in range(a.n_tries):
            grid = simd.div(extreme, splat(end * quotient))
            quotient *= a.try_ratio
            qq, qx, error = _fit(a, x, grid)
            scale = ratio(qx, qq, splat(0))
            if a.groups > 1:
                # The error of the same codes with the fitted scale.
                change = simd.sub(scale, grid)
                error = simd.sub(error, simd.mul(qq, simd.mul(change, change)))
                best, least = simd.where_less(error, least, scale, best), simd.minimum(error, least)
            else:
                fitted = scale
                for step in range(-1 if a.n_allowed else 0, 2 if a.n_allowed else 1):
                    scale = _allowed(a, x, fitted, step) if a.n_allowed else simd.round_f16(fitted)
                    error = _error(a, x, scale)
                    best, least = simd.where_less(error, least, scale, best), simd.minimum(error, least)
    return best


@njit
def _choose_integer(a: Any, x: Any, factor: Any, target: Any) -> Any:
    """Integers of least error around target / factor, and their errors."""
    first, step = splat(a.first), splat(a.step)
    middle = simd.div(simd.sub(simd.mul(target, inverse(factor)), first), step)
    best, least = splat(a.first), splat(LARGE)
    for k in (0, -1, 1):
        integer = simd.fma(round_clamped(simd.add(middle, splat(k)), 0, a.count - 1), step, first)
        error = _error(a, x, simd.mul(factor, integer))
        best, least = simd.where_less(error, least, integer, best), simd.minimum(error, least)
    return best, least


@njit
def _factor(a: Any, exact: Any) -> Any:
    """Nearest factor: unit * float16."""
    return simd.mul(splat(a.unit), simd.round_f16(simd.mul(splat(np.float32(1) / a.unit), exact)))


@njit
def _search_integers(a: Any, x: Any, target: Any) -> Any:
    extreme, row = block_extremes(a.groups, x + _EXCHANGE, target), x + _EXCHANGE
    best, best_factor, least = splat(a.first), splat(0), splat(LARGE)
    stretches, last = carray(simd.pointer(a.stretches), a.n_stretches, np.float32), a.first + a.step * (a.count - 1)
    for k in range(2 if a.first < 0 else 1):
        end = np.float32(a.first if k else last)
        for i in range(a.n_stretches):
            factor = _factor(a, simd.div(extreme, splat(end * stretches[i])))
            for _ in range(_FIT_ROUNDS):
                integer, errors = _choose_integer(a, x, factor, target)
                error = block_sums(a.groups, row, errors)
                best = simd.where_less(error, least, integer, best)
                best_factor = simd.where_less(error, least, factor, best_factor)
                least = simd.minimum(error, least)
                qq, qx, _ = _fit(a, x, simd.mul(factor, integer))
                above = block_sums(a.groups, row, simd.mul(qx, integer))
                below = block_sums(a.groups, row, simd.mul(qq, simd.mul(integer, integer)))
                factor = _factor(a, ratio(above, below, splat(0)))
    return best, best_factor


# --- the kernel ------------------------------------------------------------------------------------------------------


@njit
def _write_scales(a: Any, first: Any, x: Any, scale: Any, factor: Any) -> None:
    row = carray(simd.pointer(x + _EXCHANGE), LANES, np.float32)
    lanes = min(LANES, a.n_groups - first)
    simd.store(x + _EXCHANGE, scale)
    for lane in range(lanes):
        simd.write_f32(a.scales + 4 * (first + lane), row[lane])
    simd.store(x + _EXCHANGE, simd.mul(factor, splat(np.float32(1) / a.unit if a.groups > 1 else np.float32(1))))
    for lane in range(0, lanes, a.groups):
        simd.write_f32(a.factors + 4 * ((first + lane) // a.groups), row[lane])


@njit
def _write_codes(a: Any, first: Any, x: Any, scale: Any) -> None:
    lanes, n_vectors = min(LANES, a.n_groups - first), a.size // a.dim
    codes = carray(simd.pointer(a.codes), (a.n_groups, n_vectors), np.uint16)
    shift_codes = carray(simd.pointer(a.shift_codes), (a.n_groups, n_vectors), np.uint8)
    if a.n_entries == 0:
        by, row = inverse(scale), carray(simd.pointer(x + _EXCHANGE), LANES, np.float32)
        for i in range(a.size):
            _, index = _nearest(a, simd.load(x + i * ROW), by)
            simd.store(x + _EXCHANGE, index)
            for lane in range(lanes):
                codes[first + lane, i] = np.uint16(row[lane])
        return
    _search_vectors(a, x, scale)
    for v in range(n_vectors):
        rows = x + _FOUND + v * _VECTORS
        entries = carray(simd.pointer(rows), LANES, np.float32)
        chosen = carray(simd.pointer(rows + ROW), LANES, np.float32)
        for lane in range(lanes):
            codes[first + lane, v] = np.uint16(entries[lane])
            shift_codes[first + lane, v] = np.uint8(chosen[lane])


@kernel
def encode_groups(args: int, run: int, thread: int, n_threads: int) -> None:
    """Quantize to a codebook."""
    a = carray(simd.pointer(args), 1, CODEBOOK)[0]
    x = _memory()
    for first in units(a.n_groups, thread, n_threads):
        read_groups(a, first, x, x + _WEIGHTS)
        if a.sign_kind > 0:
            _fix_signs(a, first, x)
        scale, factor = _search_scale(a, x), splat(1)
        if a.groups > 1:
            scale, factor = _search_integers(a, x, scale)
        _write_scales(a, first, x, scale, factor)
        _write_codes(a, first, x, simd.mul(factor, scale))

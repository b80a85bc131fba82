"""Division of a step's work between threads."""

from __future__ import annotations

from typing import Any

from llamacli.kernels import simd
from llamacli.kernels.deferred import njit


@njit(inline="always")
def share(count: Any, thread: Any, n_threads: Any) -> Any:
    """First unit of this thread's share of `count`, and its end."""
    return thread * count // n_threads, (thread + 1) * count // n_threads


@njit(inline="always")
def rows_of(r: Any, slots: Any) -> Any:
    """First row and number of rows of a step.

    The rows of the run, or all slots where each row has `slots` of them.
    """
    if slots:
        return 0, (r.n_rows - r.first_row) * slots
    return r.first_row, r.n_rows - r.first_row


@njit(inline="always")
def part_of(a: Any, r: Any, group: Any, thread: Any, n_threads: Any) -> Any:
    """Part of a group of weights that a thread multiplies.

    `a` is a LINEAR, `r` a RUN. Returns the first row of activations and one past the last, and the same of tiles of
    weights.
    """
    if a.starts:
        row, end = simd.read_i64(a.starts + 8 * group), simd.read_i64(a.starts + 8 * group + 8)
        first, last = share(a.n_tiles, thread, n_threads)
    else:
        row, end = r.first_row, r.n_rows
        first, last = share(a.n_tiles * a.n_groups, thread, n_threads)
        first, last = max(0, first - group * a.n_tiles), min(a.n_tiles, last - group * a.n_tiles)
    return row, end, first, last

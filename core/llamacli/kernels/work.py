"""Division of a step's work between threads."""

from __future__ import annotations

from typing import Any

from llamacli.kernels.deferred import njit


@njit(inline="always")
def share(count: Any, thread: Any, n_threads: Any) -> Any:
    """Range of this thread's part of `count` units of work.

    Returns the first and one past the last.
    """
    return thread * count // n_threads, (thread + 1) * count // n_threads


@njit(inline="always")
def rows_of(r: Any, slots: Any) -> Any:
    """First row and number of rows of a step.

    The rows of the run, or all slots where each row has `slots` of them.
    """
    if slots:
        return 0, (r.n_rows - r.first_row) * slots
    return r.first_row, r.n_rows - r.first_row

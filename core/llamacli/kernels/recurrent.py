"""Access of kernels to recurrent states: spans of rows and their pages.

Rows of one sequence follow one another in a batch. A kernel reads the state before them from one page and writes that
after them to another, and that before the last `rows_behind` of them to a third; see `llamacli.kernels.layout`. Steps
of such kernels get all rows of a batch at once.
"""

from __future__ import annotations

from typing import Any

from llamacli.kernels import simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.layout import KEPT, ROW, SOURCE, TARGET


@njit(inline="always")
def last_row(rows: Any, first: Any, n_rows: Any) -> Any:
    """End of the rows of a sequence that begin with row `first`."""
    tokens = carray(simd.pointer(rows), n_rows, ROW)
    last = first + 1
    while last < n_rows and tokens[last].kv == tokens[first].kv:
        last += 1
    return last


@njit(inline="always")
def _entry(rows: Any, row: Any, entry: Any) -> Any:
    """Address of the entry of a row's state."""
    return carray(simd.pointer(rows), row + 1, ROW)[row].kv + entry


@njit(inline="always")
def _state(rows: Any, row: Any, entry: Any, slot: Any) -> Any:
    """Address of a row's state in a slot, 0 if empty.

    `entry` is where the state's entry begins in KVSequence.addresses, in bytes.
    """
    place = _entry(rows, row, entry)
    page = simd.read_i64(simd.read_i64(place) + 8 * slot)
    return page + simd.read_i64(place + 8) if page else page


@njit(inline="always")
def source_page(rows: Any, row: Any, entry: Any) -> Any:
    """Address of the state before the batch, 0 for zeros."""
    return _state(rows, row, entry, SOURCE)


@njit(inline="always")
def target_page(rows: Any, row: Any, entry: Any) -> Any:
    """Address of the state after the batch."""
    return _state(rows, row, entry, TARGET)


@njit(inline="always")
def rows_behind(rows: Any, row: Any, entry: Any) -> Any:
    """Last rows of a sequence before which its state is kept.

    Their number in the batch, 0 if none is wanted.
    """
    return simd.read_i64(_entry(rows, row, entry) + 16)


@njit(inline="always")
def kept_page(rows: Any, row: Any, entry: Any) -> Any:
    """Address of the state to keep, that before the last `rows_behind` rows."""
    return _state(rows, row, entry, KEPT)

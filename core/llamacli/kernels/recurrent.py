"""Kernels of verbs with recurrent states.

Rows of one sequence follow one another in a batch. A kernel reads the state before them from one page and writes that
after them to another, and that before the last `n_behind` of them to a third; see `llamacli.kernels.layout`. Steps of
these kernels get all rows of a batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels import simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import KEPT, ROW, RUN, SOURCE, TARGET
from llamacli.kernels.work import share


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
def _copy(source: Any, target: Any, first: Any, last: Any) -> None:
    old, new = carray(simd.pointer(source), last, np.float32), carray(simd.pointer(target), last, np.float32)
    for i in range(first, last):
        new[i] = old[i]


def state_kernel(
    name: str, fields: np.dtype[np.void], count: Callable[..., Any], advance: Callable[..., Any], variant: str = ""
) -> Kernel:
    """Make the kernel of a verb with a recurrent state.

    - `name` and `variant` make up its name; `fields` is the record of its parameters `a`, with STATE_FIELDS.
    - `count(a)` is the number of units of work, parts of the state that do not depend on one another.
    - `advance(a, unit, first, last, state, target)` computes rows `first` to `last` - 1, one at least, which are
      consecutive tokens of one sequence. It reads the unit's part of the state before them at the address `state`, and
      writes the part after them at `target`, another address. The state is float32 in the shape of `g.recurrent_state`.

    Both are plain functions in Numba's dialect, and are compiled here.
    """
    n_units, run_rows = njit(count), njit(advance)

    def recurrent(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, fields)[0], carray(simd.pointer(run), 1, RUN)[0]
        units, turn, first = n_units(a), thread, r.first_row
        while first < r.n_rows:
            last = last_row(r.rows, first, r.n_rows)
            n_behind = simd.read_i64(_entry(r.rows, first, a.entry) + 16)
            source, target = _state(r.rows, first, a.entry, SOURCE), _state(r.rows, first, a.entry, TARGET)
            kept = _state(r.rows, first, a.entry, KEPT) if n_behind else target
            source = source if source else a.zeros
            first_unit, last_unit = share(units, turn, n_threads)
            for unit in range(first_unit, last_unit):
                start, state = first, source
                if n_behind == last - first:
                    begin, end = share(a.n_numbers, unit, units)
                    _copy(source, kept, begin, end)
                elif n_behind:
                    start, state = last - n_behind, kept
                    run_rows(a, unit, first, start, source, kept)
                run_rows(a, unit, start, last, state, target)
            turn = (turn + 1) % n_threads  # threads take turns with the larger share
            first = last

    return Kernel(recurrent, f"_{name}{variant}", advance.__module__, (count, advance))

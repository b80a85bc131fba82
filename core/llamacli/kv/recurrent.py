"""Recurrent states of a sequence: pages with those of all layers.

Each token replaces the state, so a sequence can be rewound only to where a page was kept. Nothing is updated in place:
a batch reads one page and writes another, and the state after the cached tokens stays until all batches of an
evaluation are done. An interrupt therefore leaves it whole, and forks share it without a copy. The slots of the page
table are those of `llamacli.kernels.layout`.
"""

from __future__ import annotations

import numpy as np

from llamacli.kernels.layout import BEFORE_LAST, RECURRENT_SLOTS, SOURCE, STATE, TARGET
from llamacli.kv.pool import Pages, Table


class RecurrentTable:
    """Page table of recurrent states, and the steps of an evaluation.

    `pages` allocates them; `table`, one entry a slot, holds them. The caller holds the pool's lock.
    """

    def __init__(self, pages: Pages, table: Table):
        self.pages, self.table = pages, table

    def begin(self, *, is_empty: bool) -> None:
        """Begin an evaluation: the first batch reads STATE.

        With `is_empty` the sequence has no tokens, and STATE is zeros whatever it holds.
        """
        self._empty(SOURCE, BEFORE_LAST, *([STATE] if is_empty else []))
        self._drop_shared_target()
        if self.table[STATE]:
            self.pages.share(int(self.table[STATE]), self.table, SOURCE)

    def reserve(self, *, before_last: bool) -> None:
        """Allocate the pages that the next batch writes.

        Raises OutOfMemoryError; the state is unchanged then.
        """
        for slot in (TARGET, BEFORE_LAST) if before_last else (TARGET,):
            if not self.table[slot]:
                self.pages.allocate(self.table, slot, zeroed=False)

    def advance(self) -> None:
        """Continue after a batch: the next one reads what it wrote."""
        self.table[:] = self.table[[STATE, TARGET, SOURCE, BEFORE_LAST]]
        self._drop_shared_target()

    def committed(self) -> Table:
        """Table after the last batch.

        It is to be assigned together with the tokens.
        """
        return self.table[[TARGET, SOURCE, STATE, BEFORE_LAST]]

    def finish(self) -> None:
        """Release the pages of an evaluation, but for a spare one."""
        self._empty(SOURCE, BEFORE_LAST)
        self._drop_shared_target()

    def share(self, slot: int, table: Table, other: int) -> None:
        """Share the page of a slot, if any, with another table."""
        if self.table[slot]:
            self.pages.share(int(self.table[slot]), table, other)

    def address(self, slot: int) -> int:
        """Address of a slot's page, 0 for an empty slot."""
        return int(self.table[slot])

    def clear(self) -> None:
        """Release all pages: the state is zeros."""
        self._empty(*RECURRENT_SLOTS)

    def _drop_shared_target(self) -> None:
        """Empty TARGET if another slot or sequence has its page."""
        page = int(self.table[TARGET])
        if page and self.pages.ref_count(page) > 1:
            self.pages.release(self.table, TARGET)

    def _empty(self, *slots: int) -> None:
        for slot in slots:
            if self.table[slot]:
                self.pages.release(self.table, slot)


def new_table() -> Table:
    """An empty page table."""
    return np.zeros(len(RECURRENT_SLOTS), np.int64)

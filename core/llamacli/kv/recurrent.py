"""Recurrent states of a sequence: pages with those of all layers.

Each token replaces the state, so a sequence can be rewound only to where a page was kept: before drafted tokens, or
where `hold` says. Nothing is updated in place: a batch reads one page and writes another, and the state after the
cached tokens stays until all batches of an evaluation are done. An interrupt therefore leaves it whole, and forks share
it without a copy. The slots of the page table are those of `llamacli.kernels.layout`.
"""

from __future__ import annotations

import numpy as np

from llamacli.kernels.layout import KEPT, RECURRENT_SLOTS, SOURCE, STATE, TARGET
from llamacli.kv.pool import Pages, Table


class RecurrentTable:
    """Page table of recurrent states, and the steps of an evaluation.

    `pages` allocates them; `table`, one entry a slot, holds them. `keeps` says that slot KEPT stays filled between
    evaluations: allocating its page for every draft would take long. The caller holds the pool's lock.
    """

    def __init__(self, pages: Pages, table: Table):
        self.pages, self.table = pages, table
        self.keeps = False

    def begin(self, *, is_empty: bool) -> None:
        """Begin an evaluation: the first batch reads STATE.

        With `is_empty` the sequence has no tokens, and STATE is zeros whatever it holds.
        """
        self._empty(SOURCE, *([STATE] if is_empty else []))
        self._drop_shared(TARGET)
        if self.table[STATE]:
            self.pages.share(int(self.table[STATE]), self.table, SOURCE)

    def reserve(self, *, keep: bool) -> None:
        """Allocate the next batch's pages; OutOfMemoryError leaves the state unchanged."""
        if keep:
            self._drop_shared(KEPT)
        for slot in (TARGET, KEPT) if keep else (TARGET,):
            if not self.table[slot]:
                self.pages.allocate(self.table, slot, zeroed=False)

    def advance(self) -> None:
        """Continue after a batch: the next one reads what it wrote."""
        self.table[:] = self.table[[STATE, TARGET, SOURCE, KEPT]]
        self._drop_shared(TARGET)

    def committed(self) -> Table:
        """Table after the last batch, to be assigned together with the tokens."""
        return self.table[[TARGET, SOURCE, STATE, KEPT]]

    def rewound(self) -> Table:
        """Table with the state of slot KEPT; the present one becomes spare.

        It is to be assigned together with the tokens.
        """
        return self.table[[KEPT, SOURCE, TARGET, STATE]]

    def hold(self) -> None:
        """Share the present state with slot KEPT."""
        if not self.table[TARGET]:
            self.table[:] = self.table[[STATE, SOURCE, KEPT, TARGET]]
            self._drop_shared(TARGET)
        self._empty(KEPT)
        self.share(STATE, self.table, KEPT)

    def finish(self) -> None:
        """Release the pages of an evaluation, but for spare ones."""
        self._empty(SOURCE, *([] if self.keeps else [KEPT]))
        self._drop_shared(TARGET)

    def share(self, slot: int, table: Table, other: int) -> None:
        """Share the page of a slot, if any, with another table."""
        if self.table[slot]:
            self.pages.share(int(self.table[slot]), table, other)

    def clear(self) -> None:
        """Release all pages: the state is zeros."""
        self._empty(*RECURRENT_SLOTS)
        self.keeps = False

    def _drop_shared(self, slot: int) -> None:
        """Empty a slot if another slot or sequence has its page."""
        page = int(self.table[slot])
        if page and self.pages.ref_count(page) > 1:
            self.pages.release(self.table, slot)

    def _empty(self, *slots: int) -> None:
        for slot in slots:
            if self.table[slot]:
                self.pages.release(self.table, slot)


def new_table() -> Table:
    """An empty page table."""
    return np.zeros(len(RECURRENT_SLOTS), np.int64)

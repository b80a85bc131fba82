"""The cells of one sequence of tokens."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.kv.layout import KV_TYPES, PAGE
from llamacli.kv.pool import KVPool
from llamacli.memory import view

Floats = npt.NDArray[np.floating[Any]]


class KVSequence:
    """Keys and values of up to `seq_len` tokens, in pages of a pool that other sequences may own too.

    - `tables`: for each group of layers, int64 [n_pages]: the address of each page, 0 where there is none.
    - `addresses`: int64 [n_layer, 3], what kernels read: the address of the table of a layer's group, and the offsets
      of the layer's keys and values in a page.
    """

    def __init__(self, pool: KVPool, seq_len: int):
        self.pool, self.seq_len = pool, seq_len
        layout = pool.layout
        self.tables = [np.zeros(-(-seq_len // PAGE), np.int64) for _ in layout.groups]
        self.addresses = np.array(
            [[self.tables[place.group].ctypes.data, place.keys, place.values] for place in layout.places], np.int64
        )
        self._first_page = [0] * len(self.tables)
        self._abandoned = weakref.finalize(self, _give_back_all, pool, self.tables)
        self._abandoned.atexit = False

    @property
    def kv_type(self) -> str:
        """The type that keys and values are kept as."""
        return self.pool.layout.kv_type

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes when it is full; pages are allocated as they are needed."""
        return self.pool.layout.n_bytes(self.seq_len)

    def reserve(self, start: int, n: int) -> None:
        """Make cells `start` to `start + n - 1` this sequence's own to write. Raises MemoryError, changing nothing."""
        span = range(start // PAGE, -(-(start + n) // PAGE))
        try:
            for pages, table in zip(self.pool.groups, self.tables, strict=True):
                for i in span:
                    table[i] = pages.own(int(table[i])) if table[i] else pages.allocate()
        except MemoryError:
            self._release(-(-start // PAGE))
            raise

    def forget(self, n_past: int, *, since: int | None = None) -> None:
        """Give back pages that no token from position `n_past` on sees any more.

        With `since`, only those of them that hold tokens from there on, so that it is still possible to go back to it.
        """
        for g, group in enumerate(self.pool.layout.groups):
            if group.window is not None:
                first = max(0, n_past - group.window + 1) // PAGE
                for i in range(self._first_page[g] if since is None else -(-since // PAGE), first):
                    self._give_back(g, i)
                if since is None:
                    self._first_page[g] = max(first, self._first_page[g])

    def truncate(self, n: int) -> None:
        """Keep the first n cells.

        Raises InvalidRequestError, changing nothing, if the token after them would see some that a sliding window has
        already given up.
        """
        if not self.can_truncate(n):
            raise InvalidRequestError(f"cannot go back to position {n}: the sliding window before it is forgotten")
        self._release(-(-n // PAGE))
        if n == 0:
            self._first_page = [0] * len(self.tables)

    def can_truncate(self, n: int) -> bool:
        """Whether all is still there that a token at position n sees."""
        groups = zip(self.pool.layout.groups, self._first_page, strict=True)
        return n == 0 or all(
            group.window is None or max(0, n - group.window + 1) >= first * PAGE for group, first in groups
        )

    def fork(self) -> KVSequence:
        """A sequence with the same cells, sharing all pages; whichever writes to one first gets a copy of it."""
        child = KVSequence(self.pool, self.seq_len)
        for pages, table, other in zip(self.pool.groups, self.tables, child.tables, strict=True):
            for i in np.flatnonzero(table):
                other[i] = pages.share(int(table[i]))
        child._first_page = list(self._first_page)
        return child

    def close(self) -> None:
        """Give back all pages; closing twice does nothing."""
        self._abandoned()

    def write(self, layer: int, cell: int, k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> None:
        """Put float32 [n, n_head_kv, head_dim] keys and values into cells `cell` onwards, which have been reserved."""
        for i in range(len(k)):
            page, lane = divmod(cell + i, PAGE)
            keys, values = self._page(layer, page)
            keys[:, :, lane], values[:, lane] = k[i], v[i]

    def read(self, layer: int, n: int) -> tuple[Floats, Floats]:
        """Keys [n_head_kv, head_dim, n] and values [n_head_kv, n, head_dim] of the first n cells, float32.

        Those that are forgotten are zero.
        """
        pages = [self._page(layer, i) for i in range(-(-n // PAGE))]
        keys = np.concatenate([keys for keys, _ in pages], axis=-1)[..., :n]
        values = np.concatenate([values for _, values in pages], axis=-2)[:, :n]
        return keys.astype(np.float32), values.astype(np.float32)

    def _page(self, layer: int, i: int) -> tuple[Floats, Floats]:
        layout = self.pool.layout
        state, place, kind = layout.states[layer], layout.places[layer], KV_TYPES[layout.kv_type]
        shapes = (state.n_head_kv, state.head_dim, PAGE), (state.n_head_kv, PAGE, state.head_dim)
        page = int(self.tables[place.group][i])
        if not page:
            return np.zeros(shapes[0], kind), np.zeros(shapes[1], kind)
        n_bytes = place.values - place.keys
        parts = [view(page + start, n_bytes).view(kind) for start in (place.keys, place.values)]
        return parts[0].reshape(shapes[0]), parts[1].reshape(shapes[1])

    def _release(self, first: int) -> None:
        _give_back_all(self.pool, [table[first:] for table in self.tables])

    def _give_back(self, group: int, i: int) -> None:
        page = int(self.tables[group][i])
        if page:
            self.tables[group][i] = 0
            self.pool.groups[group].release(page)


def _give_back_all(pool: KVPool, tables: list[npt.NDArray[np.int64]]) -> None:
    for pages, table in zip(pool.groups, tables, strict=True):
        for i in np.flatnonzero(table):
            page, table[i] = int(table[i]), 0
            pages.release(page)

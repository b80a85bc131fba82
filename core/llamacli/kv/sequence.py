"""The cells of one sequence of tokens."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.kv.pool import KVPool
from llamacli.kv.types import KV_TYPES, PAGE, Bytes, Floats, FloatType, IntegerType, KVType
from llamacli.memory import view


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
    def kv_type(self) -> KVType:
        """The types that keys and values are kept as."""
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

    def write(self, layer: int, cell: int, k: Floats, v: Floats) -> None:
        """Put float32 [n, n_head_kv, head_dim] keys and values into cells `cell` onwards, which have been reserved."""
        done = 0
        while done < len(k):
            page, lane = divmod(cell + done, PAGE)
            some = slice(done, done + min(PAGE - lane, len(k) - done))
            lanes = slice(lane, lane + some.stop - done)
            for is_key, (kind, parts) in zip((True, False), self._parts(layer, page), strict=True):
                kind.write(parts, lanes, (k if is_key else v)[some], is_key=is_key)
            done = some.stop

    def read(self, layer: int, n: int) -> tuple[Floats, Floats]:
        """Keys [n_head_kv, head_dim, n] and values [n_head_kv, n, head_dim] of the first n cells, float32.

        Those that are forgotten are zero.
        """
        state = self.pool.layout.states[layer]
        keys, values = (np.zeros((state.n_head_kv, -(-n // PAGE) * PAGE, state.head_dim), np.float32) for _ in "kv")
        table = self.tables[self.pool.layout.places[layer].group]
        for page in np.flatnonzero(table[: -(-n // PAGE)]):
            cells = slice(page * PAGE, (page + 1) * PAGE)
            for is_key, (kind, parts) in zip((True, False), self._parts(layer, int(page)), strict=True):
                (keys if is_key else values)[:, cells] = kind.read(parts, state.head_dim, is_key=is_key)
        return keys[:, :n].swapaxes(1, 2), values[:, :n]

    def _parts(self, layer: int, i: int) -> list[tuple[FloatType | IntegerType, Bytes]]:
        """Of page i the keys and the values of a layer: their type and the parts of the heads."""
        layout = self.pool.layout
        place, n_head = layout.places[layer], layout.states[layer].n_head_kv
        page = int(self.tables[place.group][i])
        return [
            (KV_TYPES[name], view(page + start, n_head * size).reshape(n_head, size))
            for name, start, size in (
                (layout.kv_type.k, place.keys, place.key_bytes),
                (layout.kv_type.v, place.values, place.value_bytes),
            )
        ]

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

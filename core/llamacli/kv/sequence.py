"""The cells of one sequence of tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.kernels.kv_types.rounding import Bytes, Floats
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, FloatType, IntegerType, KVType
from llamacli.kv.pool import KVPool
from llamacli.util.locking import locked
from llamacli.util.memory import view


class KVSequence:
    """Keys and values of up to `seq_len` tokens, in pages of a pool that other sequences may own too.

    - `rope_variant`: what `seq_len` changes in how tokens are evaluated; sequences share cells within one rope_variant.
    - `tokens`: the tokens that its cells hold, token i in cell i, at position i.
    - `first_cells`: of each group of layers, the first cell that is not forgotten.
    - `cut`: the first cell that has seen other tokens than are before it now, for some were taken out; None if all have
      seen what they seem to.
    - `tables`: for each group of layers, int64 [n_pages]: the address of each page, 0 where there is none.
    - `addresses`: int64 [n_layer, 3], what kernels read: the address of the table of a layer's group, and the offsets
      of the layer's keys and values in a page.
    """

    def __init__(self, pool: KVPool, seq_len: int, rope_variant: int = 0):
        self.pool, self.seq_len, self.rope_variant = pool, seq_len, rope_variant
        self.lock = pool.lock
        self.tokens: list[int] = []
        layout = pool.layout
        self.tables = [np.zeros(-(-seq_len // PAGE), np.int64) for _ in layout.groups]
        self.addresses = np.array(
            [[self.tables[place.group].ctypes.data, place.keys, place.values] for place in layout.places], np.int64
        )
        self.first_cells = [0] * len(self.tables)
        self.cut: int | None = None
        self._abandoned = weakref.finalize(self, pool.abandoned.append, self.tables)
        self._abandoned.atexit = False

    @property
    def kv_type(self) -> KVType:
        """The types that keys and values are kept as."""
        return self.pool.layout.kv_type

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes when it is full; pages are allocated as they are needed."""
        return self.pool.layout.n_bytes(self.seq_len)

    @locked
    def reserve(self, start: int, n: int) -> None:
        """Make cells `start` to `start + n - 1` this sequence's own to write.

        Raises MemoryError, changing nothing; ClosedError.
        """
        if self.closed:
            raise ClosedError("the sequence is closed")
        self.pool.collect()
        span = range(start // PAGE, -(-(start + n) // PAGE))
        try:
            for pages, table in zip(self.pool.groups, self.tables, strict=True):
                for i in span:
                    if table[i]:
                        pages.own(table, i)
                    else:
                        pages.allocate(table, i)
        except MemoryError:
            self._release(-(-start // PAGE))
            raise

    @locked
    def evict(self, n_past: int, *, since: int | None = None) -> None:
        """Give back pages that no token from position `n_past` - 1 on sees any more: one may always be evaluated again.

        With `since`, only those of them that hold tokens from there on, so that it is still possible to go back to it.
        """
        for g, group in enumerate(self.pool.layout.groups):
            if group.window is not None:
                page = max(0, n_past - group.window) // PAGE
                start = self.first_cells[g] // PAGE if since is None else -(-since // PAGE)
                if since is None:
                    self.first_cells[g] = max(page * PAGE, self.first_cells[g])
                for i in range(start, page):
                    self._give_back(g, i)

    @locked
    def truncate(self, n: int) -> None:
        """Keep the first n cells.

        Raises InvalidRequestError, changing nothing, if the token after them would see some that a sliding window has
        already given up.
        """
        if n < 0:
            raise InvalidRequestError(f"{n} is not a number of cells to keep")
        if not self.can_truncate(n):
            raise InvalidRequestError(f"cannot go back to position {n}: the sliding window before it is forgotten")
        cut = None if self.cut is None or n <= self.cut else self.cut
        self.adopt(self.tokens[:n], self.first_cells if n else [0] * len(self.tables), cut)
        self._release(-(-n // PAGE))

    def can_truncate(self, n: int) -> bool:
        """Whether all is still there that a token at position n sees."""
        groups = zip(self.pool.layout.groups, self.first_cells, strict=True)
        return n == 0 or all(group.window is None or max(0, n - group.window + 1) >= first for group, first in groups)

    @locked
    def fork(self) -> KVSequence:
        """A sequence with the same cells, sharing all pages; whichever writes to one first gets a copy of it."""
        child = KVSequence(self.pool, self.seq_len, self.rope_variant)
        for pages, table, other in zip(self.pool.groups, self.tables, child.tables, strict=True):
            for i in np.flatnonzero(table).tolist():
                pages.share(int(table[i]), other, i)
        child.adopt(self.tokens, self.first_cells, self.cut)
        return child

    @locked
    def copy(self, source: KVSequence, start: int, stop: int) -> None:
        """Go on with tokens `start` to `stop` - 1 of another sequence, `start` being how many this one holds.

        Whole pages are shared, so this costs the pages touched. Both must hold the same tokens before `start` for the
        copied ones to mean what they meant. Raises InvalidRequestError, changing nothing, if they do not follow on what
        is here, are not all there or do not fit; MemoryError likewise.
        """
        if source.pool is not self.pool or source.rope_variant != self.rope_variant:
            raise InvalidRequestError("sequences of different models, types or RoPE variants cannot share cells")
        if not 0 <= start <= stop <= len(source.tokens) or stop > self.seq_len:
            raise InvalidRequestError(
                f"cells {start} to {stop} are not within the source's {len(source.tokens)} or ours"
            )
        if start != len(self.tokens) or source is self:
            raise InvalidRequestError(
                f"cells from {start} on would overlap or leave a gap: {len(self.tokens)} are here"
            )
        if start == stop:
            return
        if not source.can_truncate(stop):
            raise InvalidRequestError(f"cannot copy up to {stop}: the sliding window before it is forgotten")
        cuts = [cut for cut in (self.cut, source.cut) if cut is not None]
        alike = self.tokens == source.tokens[:start] and min(cuts, default=start) >= start
        first = -(-start // PAGE)
        n_partial = min(first * PAGE, stop) - start
        if n_partial:  # cells of a page that this sequence has begun
            self.reserve(start, n_partial)
            for layer, place in enumerate(self.pool.layout.places):
                if source.tables[place.group][start // PAGE]:
                    self._copy_cells(source, layer, start, n_partial, alike=alike)
        self._share(source, first, -(-stop // PAGE))
        cut = self.cut
        if cut is None:
            if not alike:
                cut = start
            elif source.cut is not None and source.cut < stop:
                cut = max(start, source.cut)
        forgotten = self.first_cells
        first_cells = [
            there if there > start else here for here, there in zip(forgotten, source.first_cells, strict=True)
        ]
        self.adopt(self.tokens + source.tokens[start:stop], first_cells, cut)
        for g, here in enumerate(forgotten):  # what is before where the source begins is of no use any more
            for i in range(here // PAGE, first_cells[g] // PAGE):
                self._give_back(g, i)

    @locked
    def remove(self, start: int, stop: int, shift_keys: Callable[[int, Floats], Floats]) -> None:
        """Take tokens `start` to `stop` - 1 out; those behind them move up, to the positions that they then have.

        `shift_keys(layer, keys)`, float32 [n_head_kv, head_dim, n], gives keys as they are at positions `stop` - `start`
        lower. Raises InvalidRequestError, changing nothing, for a range that is not there, or if a sliding window has
        forgotten what a token would then see; MemoryError, keeping what is before `start`, if that is there, as an
        interrupt may.
        """
        n = len(self.tokens)
        if not 0 <= start <= stop <= n:
            raise InvalidRequestError(f"positions {start} to {stop} are not within the {n} of the sequence")
        if stop == n or start == stop:
            self.truncate(n if start == stop else start)
            return
        left = n - (stop - start)
        forgotten = [
            first if first <= start else max(start, first - (stop - start)) for first in self.first_cells
        ]  # as things are after the cut
        for group, first in zip(self.pool.layout.groups, forgotten, strict=True):
            if group.window is not None and max(0, left - group.window + 1) < first:
                raise InvalidRequestError(
                    f"cannot close the gap at {start}: a sliding window has forgotten what is before"
                )
        cells = [self.read(layer, n, stop) for layer in range(len(self.pool.layout.states))]
        moved = [(shift_keys(layer, keys), values) for layer, (keys, values) in enumerate(cells)]
        try:
            self.reserve(start, left - start)
            for layer, (keys, values) in enumerate(moved):
                self.write(layer, start, keys.transpose(2, 0, 1), values.swapaxes(0, 1))
        except BaseException:
            self.truncate(start if self.can_truncate(start) else 0)
            raise
        cut = start if self.cut is None else min(start, self.cut)
        self.adopt(self.tokens[:start] + self.tokens[stop:], forgotten, cut)
        self._release(-(-left // PAGE))
        for g, first in enumerate(forgotten):
            for i in range(start // PAGE, first // PAGE):
                self._give_back(g, i)
        self.evict(left)

    def read_cell(self, layer: int, cell: int) -> tuple[Floats, Floats]:
        """Key and value of one cell, float32 [n_head_kv, head_dim] each."""
        head_dim = self.pool.layout.states[layer].head_dim
        (k_type, keys), (v_type, values) = self._parts(layer, cell // PAGE)
        return (
            k_type.read(keys, head_dim, is_key=True)[:, cell % PAGE],
            v_type.read(values, head_dim, is_key=False)[:, cell % PAGE],
        )

    def adopt(self, tokens: Sequence[int], first_cells: Sequence[int], cut: int | None) -> None:
        """Take these for what its pages hold, all at once: an interrupt finds none of them changed or all."""
        held, first = list(tokens), list(first_cells)
        self.tokens, self.first_cells, self.cut = held, first, cut

    @locked
    def release_pages(self, numbers: Iterable[int]) -> None:
        """Give these pages of every group back, whatever they hold."""
        for i in numbers:
            for g in range(len(self.tables)):
                self._give_back(g, i)

    @locked
    def clear_metadata(self) -> None:
        """Hold no tokens, but keep the pages for those to come."""
        self.adopt((), [0] * len(self.tables), None)

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return not self._abandoned.alive

    @locked
    def close(self) -> None:
        """Give back all pages and hold no tokens any more; closing twice does nothing."""
        self.clear_metadata()
        self._release(0)
        self._abandoned.detach()
        self.pool.collect()

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

    def read(self, layer: int, n: int, start: int = 0) -> tuple[Floats, Floats]:
        """Keys [n_head_kv, head_dim, n - start] and values [n_head_kv, n - start, head_dim] of cells up to n, float32.

        Those that are forgotten are zero.
        """
        state = self.pool.layout.states[layer]
        first, stop = start // PAGE, -(-n // PAGE)
        keys, values = (np.zeros((state.n_head_kv, (stop - first) * PAGE, state.head_dim), np.float32) for _ in "kv")
        table = self.tables[self.pool.layout.places[layer].group]
        for i in np.flatnonzero(table[first:stop]).tolist():
            cells = slice(i * PAGE, (i + 1) * PAGE)
            for is_key, (kind, parts) in zip((True, False), self._parts(layer, first + i), strict=True):
                (keys if is_key else values)[:, cells] = kind.read(parts, state.head_dim, is_key=is_key)
        wanted = slice(start - first * PAGE, n - first * PAGE)
        return keys[:, wanted].swapaxes(1, 2), values[:, wanted]

    def _parts(self, layer: int, i: int) -> list[tuple[FloatType | IntegerType, Bytes]]:
        """Of page i the keys and the values of a layer: their type and the parts of the heads."""
        layout = self.pool.layout
        place, n_head = layout.places[layer], layout.states[layer].n_head_kv
        page = int(self.tables[place.group][i])
        if not page:
            raise InvalidRequestError(f"page {i} of the sequence is not there: it was not reserved, or is forgotten")
        return [
            (KV_TYPES[name], view(page + start, n_head * size).reshape(n_head, size))
            for name, start, size in (
                (layout.kv_type.k, place.keys, place.key_bytes),
                (layout.kv_type.v, place.values, place.value_bytes),
            )
        ]

    def _copy_cells(self, source: KVSequence, layer: int, start: int, n: int, *, alike: bool) -> None:
        """Some cells of a page, byte by byte; but keys are less a mean of those before, which may not be `alike`."""
        page, lane = divmod(start, PAGE)
        lanes = slice(lane, lane + n)
        head_dim = self.pool.layout.states[layer].head_dim
        for is_key, (kind, mine), (_, theirs) in zip(
            (True, False), self._parts(layer, page), source._parts(layer, page), strict=True
        ):
            if alike or not is_key:
                kind.copy(mine, theirs, lanes, head_dim, is_key=is_key)
            else:
                x = kind.read(theirs, head_dim, is_key=is_key)[:, lanes]
                kind.write(mine, lanes, x.swapaxes(0, 1), is_key=is_key)

    def _share(self, source: KVSequence, first: int, stop: int) -> None:
        """Own pages `first` to `stop` - 1 of another sequence too."""
        for pages, table, other in zip(self.pool.groups, self.tables, source.tables, strict=True):
            for i in range(first, stop):
                if table[i]:
                    pages.release(table, i)
                if other[i]:
                    pages.share(int(other[i]), table, i)

    def _release(self, first: int) -> None:
        self.pool.give_back([table[first:] for table in self.tables])

    def _give_back(self, group: int, i: int) -> None:
        if self.tables[group][i]:
            self.pool.groups[group].release(self.tables[group], i)

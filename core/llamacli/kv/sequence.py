"""KV cache of one sequence of tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np

from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.inputs import is_in_span, is_positioned
from llamacli.kernels.kv_types.rounding import Bytes, Floats
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, FloatType, IntegerType, KVType
from llamacli.kernels.layout import KEPT, RECURRENT_SLOTS, SOURCE, STATE, TARGET
from llamacli.kv.layout import KVLayout
from llamacli.kv.pool import KVPool, Table
from llamacli.kv.recurrent import RecurrentTable, new_table
from llamacli.util.locking import locked
from llamacli.util.memory import view


@attrs.frozen
class _Part:
    """Stored keys or values of a layer in a page.

    `bytes` is uint8 [n_head_kv, part_bytes]; each head has `width` numbers a cell.
    """

    kind: FloatType | IntegerType
    bytes: Bytes
    width: int
    is_key: bool = attrs.field(kw_only=True)


class KVSequence:
    """Cached keys, values and recurrent states of up to `seq_len` tokens.

    Pages may be shared with other sequences of the pool and are copied on write. Recurrent states are there only for
    all tokens, and for `n_kept` of them: a sequence that has them can be truncated to these, or to none.

    - `rope_variant`: the RoPE variant for a context of `seq_len`; only sequences of one variant can share cells.
    - `adapters`: the LoRA adapters and scales that cells are computed with, "" for none; likewise.
    - `tokens`: content keys of the cached tokens (`llamacli.inputs`): the id of a plain one, a negative int of others.
      Token i is in cell i, and at position i unless it or one before it has an explicit position.
    - `first_cells`: for each group of layers, the first cell that has not been evicted.
    - `first_stale_cell`: cells from here on were computed with a different prefix (after `remove`); None if there are
      no such cells.
    - `tables`: for each group of layers, the page table, int64 [n_pages].
    - `extent`: the number of slots of a table that have been used so far, in a list of one. Tables are as long as the
      context, which may be huge: nothing looks at the slots from there on.
    - `addresses`: the index that kernels read, int64 [n_layer, 3]: the address of the layer's page table, and byte
      offsets of the layer's keys and values in a page. Recurrent states follow the layers: the address of their page
      table, the byte offset of the state in a page, and `n_behind`. `address`: its own address.
    - `n_kept`: tokens after which recurrent states are kept, beside those after all tokens; None without.
    """

    def __init__(self, pool: KVPool, seq_len: int, rope_variant: int = 0, adapters: str = ""):
        self.pool, self.seq_len, self.rope_variant, self.adapters = pool, seq_len, rope_variant, adapters
        self.lock = pool.lock
        self.tokens: list[int] = []
        layout = pool.layout
        n_pages = -(-seq_len // PAGE)
        self.tables = [new_table() if group.recurrent else np.zeros(n_pages, np.int64) for group in layout.groups]
        n_cell_groups = len(self.tables) - bool(layout.recurrent)
        self._cells = list(zip(pool.groups, self.tables, strict=True))[:n_cell_groups]
        self._recurrent = RecurrentTable(pool.groups[-1], self.tables[-1]) if layout.recurrent else None
        entries = [(self.tables[place.group].ctypes.data, place.keys, place.values) for place in layout.places]
        entries += [(self.tables[-1].ctypes.data, offset, 0) for offset in layout.offsets]
        self.addresses = np.array(entries, np.int64).reshape(-1, 3)
        self.address = self.addresses.ctypes.data
        self._rows_behind = self.addresses[len(layout.places) :, 2]
        self.n_kept: int | None = None
        self.first_cells = [0] * len(self.tables)
        self.first_stale_cell: int | None = None
        self.extent = [len(RECURRENT_SLOTS)]
        self._finalizer = weakref.finalize(self, pool.abandoned.append, (self.tables, self.extent))
        self._finalizer.atexit = False

    @property
    def kv_type(self) -> KVType:
        """Types of the cached keys and values."""
        return self.pool.layout.kv_type

    @property
    def n_bytes(self) -> int:
        """Maximum size in bytes; pages are allocated as needed."""
        return self.pool.layout.n_bytes(self.seq_len)

    def reserve(self, start: int, n: int, *, n_behind: int = 0) -> None:
        """Allocate `n` cells from `start` on for writing; shared pages are copied.

        Recurrent states before the last `n_behind` of these tokens will be kept, for `fork_before_last` or `truncate`.
        Raises OutOfMemoryError, changing nothing but `n_kept`; ClosedError.
        """
        with self.lock:
            if not self._finalizer.alive:
                raise ClosedError("the sequence is closed")
            if self.pool.abandoned:
                self.pool.collect()
            span = range(start // PAGE, -(-(start + n) // PAGE))
            self.extent[0] = max(self.extent[0], span.stop)
            try:
                for pages, table in self._cells:
                    for i in span:
                        if table[i]:
                            if pages.ref_counts[int(table[i])] > 1:
                                pages.copy_on_write(table, i)
                        else:
                            pages.allocate(table, i)
                if self._recurrent is not None:
                    if start == len(self.tokens):
                        self._recurrent.begin(is_empty=not start)
                    if n_behind:
                        self.n_kept = None
                    self._recurrent.reserve(keep=n_behind > 0)
                    self._rows_behind[:] = n_behind
            except MemoryError:
                self._release_from(-(-start // PAGE))
                raise

    def extend(self, n_pages: int) -> None:
        """Count the first `n_pages` slots as used, before they are filled."""
        self.extent[0] = max(self.extent[0], n_pages)

    def held_pages(self, group: int) -> Table:
        """Addresses of the sequence's pages of a group, int64 [n]."""
        table = self.tables[group][: self.extent[0]]
        return table[table != 0]

    def is_like(self, other: KVSequence) -> bool:
        """Check that equal tokens have equal cells in another sequence."""
        return (self.rope_variant, self.adapters) == (other.rope_variant, other.adapters)

    def has_cells_of(self, other: KVSequence, n: int) -> bool:
        """Check that the first n cells are the same as another sequence's."""
        if self.tokens[:n] != other.tokens[:n]:
            return False
        if all(sequence.first_stale_cell is None or sequence.first_stale_cell >= n for sequence in (self, other)):
            return True
        stop = -(-n // PAGE)
        tables = zip(self._cells, other._cells, strict=True)
        return all(np.array_equal(own[:stop], theirs[:stop]) for (_, own), (_, theirs) in tables)

    @locked
    def bytes_to_reserve(self, n: int) -> int:
        """Maximum bytes of `reserve` for n tokens in any batches.

        It is exact without recurrent states. A second batch reads the page of states that the first one wrote, and
        writes another.
        """
        start = len(self.tokens)
        n_bytes = 0
        for pages, table in self._cells:
            for page in table[start // PAGE : -(-(start + n) // PAGE)].tolist():
                if not page or pages.ref_counts[page] > 1:
                    n_bytes += pages.page_bytes
        if self._recurrent is None:
            return n_bytes
        pages, table = self.pool.groups[-1], self.tables[-1]
        n_states = sum(pages.ref_count(int(table[slot])) != 1 for slot in ((TARGET, KEPT) if n > 1 else (TARGET,)))
        return n_bytes + (n_states + (n > 1)) * pages.page_bytes

    @locked
    def evict(self, n_past: int, *, since: int | None = None) -> None:
        """Release pages that lie before the sliding windows.

        These are the windows of all tokens from position `n_past` - 1 on. The last token can therefore always be
        evaluated again. With `since`, only pages that begin at that cell or later are released, so that the sequence
        can still be truncated to `since`.
        """
        for g, group in enumerate(self.pool.layout.groups):
            if group.evicts:
                page = group.first_seen(max(0, n_past - 1)) // PAGE
                start = self.first_cells[g] // PAGE if since is None else -(-since // PAGE)
                if since is None:
                    self.first_cells[g] = max(page * PAGE, self.first_cells[g])
                for i in range(start, page):
                    self._release_page(g, i)

    @locked
    def advance(self, n_past: int) -> None:
        """Continue an evaluation after a batch that ends at position `n_past` - 1.

        Pages behind sliding windows are released, but for those that `truncate` to the present tokens needs.
        """
        self.evict(n_past, since=len(self.tokens))
        if self._recurrent is not None:
            self._recurrent.advance()

    def commit(self, tokens: Sequence[int], *, n_ahead: int = 0) -> None:
        """Append tokens whose cells and recurrent states have been written.

        Sliding windows keep what truncating by the last `n_ahead` of them needs; recurrent states before these must
        have been kept, see `reserve`.
        """
        added = list(tokens)
        with self.lock:
            if self._recurrent is None:
                self.tokens += added
            elif added:
                table, committed = self._recurrent.table, self._recurrent.committed()
                self._recurrent.keeps |= n_ahead > 0
                n_kept = len(self.tokens) + len(added) - n_ahead if n_ahead else self.n_kept
                self.tokens += added  # no call from here on: an interrupt finds all changed or nothing
                self.n_kept = n_kept
                table[:] = committed
            if self.pool.layout.has_windows:
                self.evict(len(self.tokens) - n_ahead)

    @locked
    def hold(self) -> None:
        """Keep the present recurrent states, so that `truncate` can return to them."""
        if self._recurrent is not None:
            self.n_kept = None
            self._recurrent.keeps = True
            self._recurrent.hold()
            self.n_kept = len(self.tokens)

    @locked
    def finish(self) -> None:
        """Release pages of recurrent states that only the evaluation needed."""
        if self._recurrent is not None:
            self._recurrent.finish()

    @locked
    def truncate(self, n: int) -> None:
        """Keep the first n cells only.

        Raises InvalidRequestError, changing nothing, if the token after them would attend to evicted cells, or if the
        recurrent states are those after later tokens.
        """
        if n < 0:
            raise InvalidRequestError(f"n must be at least 0, not {n}")
        rewinds = self._recurrent is not None and 0 < n < len(self.tokens)
        if rewinds and n != self.n_kept:
            raise InvalidRequestError(
                f"cannot truncate to {n} tokens: the recurrent states are those after all {len(self.tokens)}"
            )
        if not self.can_truncate(n):
            raise InvalidRequestError(f"cannot truncate to {n} tokens: the sliding window before them was evicted")
        states = self._recurrent.rewound() if self._recurrent is not None and rewinds else None
        stale = None if self.first_stale_cell is None or n <= self.first_stale_cell else self.first_stale_cell
        self.set_contents(self.tokens[:n], self.first_cells if n else [0] * len(self.tables), stale, states)
        self._release_from(-(-n // PAGE))
        if self._recurrent is not None and not n:
            self._recurrent.clear()
        self.finish()

    def floor(self, n: int) -> int:
        """Largest number of tokens to which `truncate` is possible, at most n."""
        if self.can_truncate(n):
            return min(n, len(self.tokens))
        kept = self.n_kept or 0
        return kept if kept < n and self.can_truncate(kept) else 0

    def can_truncate(self, n: int) -> bool:
        """Check that the cells and recurrent states for position n are cached."""
        if self._recurrent is not None and 0 < n < len(self.tokens) and n != self.n_kept:
            return False
        groups = zip(self.pool.layout.groups, self.first_cells, strict=True)
        return n == 0 or all(group.has(n, first) for group, first in groups)

    @locked
    def fork(self) -> KVSequence:
        """Create a sequence that shares all pages, which are copied on write."""
        return self._fork(self.tokens, STATE)

    @locked
    def fork_before_last(self) -> KVSequence:
        """Fork without the last token, directly after `commit`; `reserve` keeps states."""
        return self._fork(self.tokens[:-1], KEPT)

    @locked
    def fork_within(self, tokens: Sequence[int]) -> KVSequence:
        """Create a sequence that ends with the last batch.

        To be called directly after `advance`. `tokens` are those cached and those evaluated since.
        """
        child = self._fork(tokens, SOURCE)
        child.evict(len(tokens))
        return child

    def _fork(self, tokens: Sequence[int], slot: int) -> KVSequence:
        child = KVSequence(self.pool, self.seq_len, self.rope_variant, self.adapters)
        child.extend(self.extent[0])
        for (pages, table), (_, other) in zip(self._cells, child._cells, strict=True):
            for i in np.flatnonzero(table[: self.extent[0]]).tolist():
                pages.share(int(table[i]), other, i)
        if self._recurrent is not None:
            self._recurrent.share(slot, child.tables[-1], STATE)
        child.set_contents(tokens, self.first_cells, self.first_stale_cell)
        return child

    @locked
    def copy(self, source: KVSequence, start: int, stop: int) -> None:
        """Append tokens `start` to `stop` - 1 of another sequence.

        `start` must be the number of tokens here. Whole pages are shared; cells of a page that this sequence has begun
        are copied. If the tokens before `start` differ, the copied cells are stale. Raises InvalidRequestError,
        changing nothing, if the range does not follow the tokens here, is not cached in `source`, or does not fit, or
        if it is a part of a sequence with recurrent states, or follows other tokens and has explicit positions or
        bidirectional spans; OutOfMemoryError likewise.
        """
        if source.pool is not self.pool or not self.is_like(source):
            raise InvalidRequestError(
                "sequences of different models, types, RoPE variants or LoRA adapters cannot share cells"
            )
        if not 0 <= start <= stop <= len(source.tokens) or stop > self.seq_len:
            raise InvalidRequestError(
                f"cells {start} to {stop} are not within the source's {len(source.tokens)}"
                f" or this sequence's {self.seq_len}"
            )
        if start != len(self.tokens) or source is self:
            raise InvalidRequestError(
                f"cells from {start} on would overlap or leave a gap: {len(self.tokens)} are here"
            )
        if start == stop:
            return
        stale_cells = [cell for cell in (self.first_stale_cell, source.first_stale_cell) if cell is not None]
        same_prefix = self.tokens == source.tokens[:start] and min(stale_cells, default=start) >= start
        if self._recurrent is not None and not (same_prefix and stop == len(source.tokens)):
            raise InvalidRequestError(
                f"cannot copy tokens {start} to {stop} alone: the recurrent states are those after all"
                f" {len(source.tokens)} tokens of the source, from its first on"
            )
        if not same_prefix:
            _expect_movable(self.tokens + source.tokens[:stop], f"cannot copy tokens {start} to {stop} alone")
        if not source.can_truncate(stop):
            raise InvalidRequestError(f"cannot copy up to {stop}: the sliding window before it was evicted")
        first = -(-start // PAGE)
        n_partial = min(first * PAGE, stop) - start
        if n_partial:  # the rest of a page that this sequence has begun
            self.reserve(start, n_partial)
            for g in range(len(self._cells)):
                page, other = (int(sequence.tables[g][start // PAGE]) for sequence in (self, source))
                if other:
                    self.pool.log_cells(g, page, other, start % PAGE, n_partial, same_prefix=same_prefix)
                    copy_cells(self.pool.layout, g, page, other, start % PAGE, n_partial, same_prefix=same_prefix)
        self._share(source, first, -(-stop // PAGE))
        stale = self.first_stale_cell
        if stale is None:
            if not same_prefix:
                stale = start
            elif source.first_stale_cell is not None and source.first_stale_cell < stop:
                stale = max(start, source.first_stale_cell)
        before = self.first_cells
        first_cells = [
            theirs if theirs > start else own for own, theirs in zip(before, source.first_cells, strict=True)
        ]
        states = None
        if self._recurrent is not None and source._recurrent is not None:
            self._recurrent.finish()
            source._recurrent.share(STATE, self.tables[-1], SOURCE)
            states = self.tables[-1][[SOURCE, STATE, TARGET, KEPT]]
        self.set_contents(self.tokens + source.tokens[start:stop], first_cells, stale, states)
        self.finish()
        for g, own in enumerate(before):  # own cells before a gap are outside the window
            for i in range(own // PAGE, first_cells[g] // PAGE):
                self._release_page(g, i)

    @locked
    def remove(self, start: int, stop: int, shift_keys: Callable[[int, Floats], Floats]) -> None:
        """Remove tokens `start` to `stop` - 1.

        Later tokens move to lower positions, and their cells become stale. `shift_keys(layer, keys)` returns keys,
        float32 [n_head_kv, head_dim, n], shifted to positions lower by `stop` - `start` (RoPE). Raises
        InvalidRequestError, changing nothing, if the range is not cached or a token would then attend to evicted cells.
        OutOfMemoryError and KeyboardInterrupt leave the tokens before `start`, or none if the sequence cannot be
        truncated there.
        """
        n = len(self.tokens)
        if not 0 <= start <= stop <= n:
            raise InvalidRequestError(f"positions {start} to {stop} are not within the {n} of the sequence")
        if stop == n or start == stop:
            self.truncate(n if start == stop else start)
            return
        if self._recurrent is not None:
            raise InvalidRequestError(
                f"cannot remove positions {start} to {stop}: recurrent states cannot lose tokens before the last"
            )
        if self.pool.layout.held is not None:
            raise InvalidRequestError(
                f"cannot remove positions {start} to {stop}: keys of other pipeline stages cannot be shifted"
            )
        _expect_movable(self.tokens, f"cannot remove positions {start} to {stop}")
        left = n - (stop - start)
        first_cells = [
            first if first <= start else max(start, first - (stop - start)) for first in self.first_cells
        ]  # after the removal
        for group, first in zip(self.pool.layout.groups, first_cells, strict=True):
            if group.evicts and group.first_seen(left) < first:
                raise InvalidRequestError(
                    f"cannot remove positions {start} to {stop}: the sliding window before them was evicted"
                )
        cells = [self.read(layer, n, stop) for layer in range(len(self.pool.layout.specs))]
        moved = [(shift_keys(layer, keys), values) for layer, (keys, values) in enumerate(cells)]
        stale = start if self.first_stale_cell is None else min(start, self.first_stale_cell)
        tokens = self.tokens[:start] + self.tokens[stop:]
        try:
            self.reserve(start, left - start)
            for layer, (keys, values) in enumerate(moved):
                self.write(layer, start, keys.transpose(2, 0, 1), values.swapaxes(0, 1))
            self.set_contents(tokens, first_cells, stale)
        except BaseException:
            self.truncate(start if self.can_truncate(start) else 0)
            raise
        self._release_from(-(-left // PAGE))
        for g, first in enumerate(first_cells):
            for i in range(start // PAGE, first // PAGE):
                self._release_page(g, i)
        self.evict(left)

    def place_states(self, n_behind: int) -> None:
        """Set `n_behind` of a sequence whose tables another stage filled."""
        self._rows_behind[:] = n_behind

    def read_cell(self, layer: int, cell: int) -> tuple[Floats, Floats]:
        """Read a cell's key and value, float32 [n_head_kv, head_dim or value_dim]."""
        keys, values = self._read_page(layer, cell // PAGE)
        return keys[:, cell % PAGE], values[:, cell % PAGE]

    def read_state(self, i: int, slot: int = STATE) -> Floats:
        """Recurrent state `i`, float32 in its shape; a copy.

        During an evaluation, slot SOURCE holds the state before the batch.
        """
        state = self._state(i, slot)
        return np.zeros(self.pool.layout.recurrent[i].shape, np.float32) if state is None else state.copy()

    @property
    def n_behind(self) -> int:
        """Last tokens of the batch before which recurrent states are kept."""
        return int(self._rows_behind[0]) if len(self._rows_behind) else 0

    def write_state(self, i: int, last: Floats, kept: Floats) -> None:
        """Write recurrent state `i` after a batch, and the one to keep.

        Both are float32 in the state's shape. The second is that before the last `n_behind` tokens, and is ignored if
        these are 0.
        """
        for slot, values in ((TARGET, last), (KEPT, kept)) if self.n_behind else ((TARGET, last),):
            state = self._state(i, slot)
            if state is not None:
                state[:] = values

    def _state(self, i: int, slot: int) -> Floats | None:
        layout = self.pool.layout
        page, spec = int(self.tables[-1][slot]), layout.recurrent[i]
        if not page:
            return None
        return view(page + layout.offsets[i], spec.n_bytes).view(np.float32).reshape(spec.shape)

    def set_contents(
        self,
        tokens: Sequence[int],
        first_cells: Sequence[int],
        first_stale_cell: int | None,
        states: Table | None = None,
    ) -> None:
        """Record what the pages hold. Interrupt-safe, see `llamacli.kv.pool`.

        `states` are the slots of the recurrent states from now on, a permutation of the present ones.
        """
        new_tokens, new_first_cells = list(tokens), list(first_cells)
        self.n_kept = None
        self.tokens, self.first_cells, self.first_stale_cell = new_tokens, new_first_cells, first_stale_cell
        if states is not None:
            self.tables[-1][:] = states

    @locked
    def release_pages(self, numbers: Iterable[int]) -> None:
        """Release these pages of every group, whatever they hold."""
        for i in numbers:
            for g in range(len(self._cells)):
                self._release_page(g, i)

    @locked
    def clear_metadata(self) -> None:
        """Drop all tokens but keep the pages for new ones."""
        self.set_contents((), [0] * len(self.tables), None)
        if self._recurrent is not None:
            self._recurrent.clear()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._finalizer.alive

    @locked
    def close(self) -> None:
        """Drop all tokens and release all pages; closing twice does nothing."""
        self.clear_metadata()
        self._release_from(0)
        self._finalizer.detach()
        self.pool.collect()

    def write(self, layer: int, cell: int, k: Floats, v: Floats) -> None:
        """Write keys and values into reserved cells from `cell` on.

        `k` is float32 [n, n_head_kv, head_dim] and `v` [n, n_head_kv, value_dim]; values that are parts of keys are
        not written.
        """
        done = 0
        while done < len(k):
            page, lane = divmod(cell + done, PAGE)
            some = slice(done, done + min(PAGE - lane, len(k) - done))
            lanes = slice(lane, lane + some.stop - done)
            for part in self._parts(layer, page):
                part.kind.write(part.bytes, lanes, (k if part.is_key else v)[some], is_key=part.is_key)
            done = some.stop

    def read(self, layer: int, n: int, start: int = 0) -> tuple[Floats, Floats]:
        """Read the keys and values of cells `start` to n - 1.

        Keys are float32 [n_head_kv, head_dim, n - start], values [n_head_kv, n - start, value_dim]. Evicted cells are
        zero.
        """
        spec = self.pool.layout.specs[layer]
        first, stop = start // PAGE, -(-n // PAGE)
        keys, values = (
            np.zeros((spec.n_head_kv, (stop - first) * PAGE, width), np.float32)
            for width in (spec.head_dim, spec.value_dim)
        )
        table = self.tables[self.pool.layout.places[layer].group]
        for i in np.flatnonzero(table[first:stop]).tolist():
            cells = slice(i * PAGE, (i + 1) * PAGE)
            keys[:, cells], values[:, cells] = self._read_page(layer, first + i)
        wanted = slice(start - first * PAGE, n - first * PAGE)
        return keys[:, wanted].swapaxes(1, 2), values[:, wanted]

    def _read_page(self, layer: int, i: int) -> list[Floats]:
        """Read keys and values of page i, [n_head_kv, PAGE, width] each."""
        spec = self.pool.layout.specs[layer]
        cells = [part.kind.read(part.bytes, part.width, is_key=part.is_key) for part in self._parts(layer, i)]
        return [cells[0], cells[0][..., : spec.value_dim]] if spec.values_in_keys else cells

    def _parts(self, layer: int, i: int) -> list[_Part]:
        """Stored keys of a layer in page i, and values stored apart."""
        page = int(self.tables[self.pool.layout.places[layer].group][i])
        if not page:
            raise InvalidRequestError(f"page {i} of the sequence is not there: it was not reserved, or evicted")
        return _parts_of(self.pool.layout, layer, page)

    def _share(self, source: KVSequence, first: int, stop: int) -> None:
        self.extend(stop)
        for (pages, table), (_, other) in zip(self._cells, source._cells, strict=True):
            for i in range(first, stop):
                if table[i]:
                    pages.release(table, i)
                if other[i]:
                    pages.share(int(other[i]), table, i)

    def _release_from(self, first: int) -> None:
        for pages, table in self._cells:
            for i in np.flatnonzero(table[first : self.extent[0]]).tolist():
                pages.release(table, first + i)

    def _release_page(self, group: int, i: int) -> None:
        if self.tables[group][i]:
            self.pool.groups[group].release(self.tables[group], i)


def _parts_of(layout: KVLayout, layer: int, page: int) -> list[_Part]:
    place, spec = layout.places[layer], layout.specs[layer]

    def part(name: str, start: int, size: int, width: int, is_key: bool) -> _Part:
        return _Part(KV_TYPES[name], view(page + start, spec.n_head_kv * size).reshape(-1, size), width, is_key=is_key)

    keys = part(layout.kv_type.k, place.keys, place.key_bytes, spec.head_dim, True)
    if spec.values_in_keys:
        return [keys]
    return [keys, part(layout.kv_type.v, place.values, place.value_bytes, spec.value_dim, False)]


def copy_cells(layout: KVLayout, group: int, page: int, source: int, lane: int, n: int, *, same_prefix: bool) -> None:
    """Copy cells of one page to another, in a group's layers.

    They are `lane` to `lane` + n - 1. The copy is bit for bit, but keys after another prefix are delta-coded again.
    """
    lanes = slice(lane, lane + n)
    for layer, place in enumerate(layout.places):
        if place.group != group or not place.key_bytes:
            continue
        for mine, theirs in zip(_parts_of(layout, layer, page), _parts_of(layout, layer, source), strict=True):
            kind, is_key = mine.kind, mine.is_key
            if same_prefix or not is_key:
                kind.copy(mine.bytes, theirs.bytes, lanes, mine.width, is_key=is_key)
            else:
                x = kind.read(theirs.bytes, mine.width, is_key=is_key)[:, lanes]
                kind.write(mine.bytes, lanes, x.swapaxes(0, 1), is_key=is_key)


def _expect_movable(keys: Sequence[int], failure: str) -> None:
    if any(key < 0 and (is_positioned(key) or is_in_span(key)) for key in keys):
        raise InvalidRequestError(f"{failure}: there are tokens with explicit positions, or that attend to each other")


def held_bytes(pool: KVPool, sequences: Sequence[KVSequence]) -> int:
    """Bytes of the pages that sequences hold; shared pages count once."""
    total = 0
    for g, pages in enumerate(pool.groups):
        held = [sequence.held_pages(g).tolist() for sequence in sequences]
        total += pages.page_bytes * len(set().union(*held))
    return total

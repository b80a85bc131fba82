"""Paged memory of the KV cache: allocation, reference counts and copy-on-write.

KeyboardInterrupt safety, here and in the other modules of this package: Python raises KeyboardInterrupt only at calls
and backward jumps. Values that must agree (a page's reference count and the table slot that holds it, a sequence's
tokens and its first cells) are therefore computed first and then assigned with no call in between, so an interrupt
leaves all of them changed or none.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import OutOfMemoryError
from llamacli.kv.layout import KVLayout
from llamacli.util.locking import fork_safe
from llamacli.util.memory import anonymous
from llamacli.util.system import available_memory

_SLAB_BYTES = 1 << 24

_READ_AFTER_S = 1.0
"""Seconds after which the available memory is read again: the files of cgroups take 0.3 ms."""

_PAGE_PADDING = 33 * 64
"""Bytes between pages: padding against cache-set conflicts, which distances of a power of two cause. Kernels may also
read a whole vector at the end of a row, past the end of the page."""

Table = npt.NDArray[np.int64]
"""Page table: the address of each page, 0 for an empty slot."""

ALLOCATED, COPIED, FREED, CELLS = range(4)
"""What happened to a page, see `PageLog`: CELLS of it were copied from another one."""

PageLog = deque[tuple[int, int, int, int, int]]
"""Changes of pages in order: what happened, the group, the page, the one that was copied, and which of its cells: the
first one, their number << 8, and 1 << 16 if both have the same prefix."""


@attrs.define(eq=False)
class _Slab:
    """Slab: memory for several pages.

    `free` lists released pages; pages from number `fresh` on were never used.
    """

    memory: npt.NDArray[np.uint8]
    n_pages: int
    free: list[int] = attrs.field(factory=list)
    fresh: int = 0

    @property
    def base(self) -> int:
        return int(self.memory.ctypes.data)

    @property
    def n_used(self) -> int:
        return self.fresh - len(self.free)


class Pages:
    """Page allocator with reference counts, for pages of one size.

    Pages are identified by address. Memory is requested from the system in slabs as needed, and returned when a slab is
    empty. Allocated pages are zeroed. The owners of a page are the table slots that hold it. `expect_room` is called
    with the bytes of a page before it is allocated, and raises OutOfMemoryError if a limit forbids that. Methods may be
    called from any thread and are interrupt-safe (see the module). `ref_counts`: the number of owners of each page in
    use. `log`, if given, gets each change; an interrupt may leave a page logged as allocated that is free.
    """

    def __init__(
        self,
        page_bytes: int,
        expect_room: Callable[[int], None] = lambda n_bytes: None,
        log: Callable[[int, int, int], None] | None = None,
    ):
        self.page_bytes, self._expect_room, self._log = page_bytes, expect_room, log
        self._stride = -(-page_bytes // 4096) * 4096 + _PAGE_PADDING
        self._slab_pages = max(1, min(64, _SLAB_BYTES // self._stride))
        self._slabs: list[_Slab] = []  # sorted by address
        self.ref_counts: dict[int, int] = {}
        self._lock = fork_safe(threading.Lock())
        self._room = _Room()

    @property
    def n_used(self) -> int:
        """Number of pages in use."""
        return len(self.ref_counts)

    @property
    def n_bytes(self) -> int:
        """Bytes requested from the system."""
        return sum(slab.memory.nbytes for slab in self._slabs)

    def ref_count(self, page: int) -> int:
        """Reference count of a page; 0 if it is free."""
        return self.ref_counts.get(page, 0)

    def allocate(self, table: Table, i: int, *, zeroed: bool = True) -> None:
        """Put a page into the empty slot i of a table.

        It is filled with zeros unless they are not needed. Raises OutOfMemoryError.
        """
        with self._lock:
            slab, page = self._find_free()
            if zeroed and slab.free:
                ctypes.memset(page, 0, self.page_bytes)
            if self._log is not None:
                self._log(ALLOCATED, page, 0)
            self._assign(slab, page, table, i)

    def share(self, page: int, table: Table, i: int) -> None:
        """Put a shared page into the empty slot i of a table."""
        with self._lock:
            self.ref_counts[page] += 1
            table[i] = page

    def copy_on_write(self, table: Table, i: int) -> None:
        """Replace a shared page in slot i by a copy; raises OutOfMemoryError."""
        with self._lock:
            page = int(table[i])
            if self.ref_counts[page] > 1:
                slab, copy = self._find_free()
                if not slab.free:  # an interrupt could leave the page half written, and fresh ones must be zeros
                    slab.fresh += 1
                    slab.free += [copy]
                ctypes.memmove(copy, page, self.page_bytes)
                if self._log is not None:
                    self._log(COPIED, copy, page)
                self._assign(slab, copy, table, i)

    def release(self, table: Table, i: int) -> None:
        """Empty slot i of a table; free an unreferenced page."""
        with self._lock:
            page = int(table[i])
            ref_count = self.ref_counts[page] - 1
            at = bisect.bisect_right(self._slabs, page, key=lambda slab: slab.base) - 1
            slab = self._slabs[at]
            table[i] = 0
            if ref_count:
                self.ref_counts[page] = ref_count
            else:
                del self.ref_counts[page]
                slab.free.append(page)
                if not slab.n_used:
                    del self._slabs[at]
                if self._log is not None:
                    self._log(FREED, page, 0)

    def _find_free(self) -> tuple[_Slab, int]:
        self._expect_room(self.page_bytes)
        slab = next((slab for slab in self._slabs if slab.free or slab.fresh < slab.n_pages), None)
        if slab is None:
            slab = _Slab(self._room.allocate(self._slab_pages * self._stride), self._slab_pages)
            bisect.insort(self._slabs, slab, key=lambda slab: slab.base)
        return slab, slab.free[-1] if slab.free else slab.base + slab.fresh * self._stride

    def _assign(self, slab: _Slab, page: int, table: Table, i: int) -> None:
        before = int(table[i])
        if before:
            self.ref_counts[before] -= 1
        if slab.free:
            del slab.free[-1]
        else:
            slab.fresh += 1
        self.ref_counts[page] = 1
        table[i] = page


class _Room:
    """Memory that is available for slabs.

    It is read again after a second, or when a slab takes more than half of what is left.
    """

    def __init__(self) -> None:
        self._left: int | None = 0  # None if unknown
        self._read_at = -math.inf

    def allocate(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Zeros, uint8 [n_bytes]. Raises OutOfMemoryError."""
        now, left = time.monotonic(), self._left
        if now - self._read_at > _READ_AFTER_S or (left is not None and 2 * n_bytes > left):
            left, self._read_at = available_memory(), now
        try:
            if left is None or n_bytes <= left:
                memory = anonymous(n_bytes)
                self._left = None if left is None else left - n_bytes
                return memory
        except MemoryError:
            pass
        raise OutOfMemoryError(n_bytes, left or 0)


class KVPool:
    """KV cache memory shared by all sequences of a model.

    A pool has one cache type.

    - `identity`: hash of the model and mode; sequences of another identity cannot be restored here.
    - `lock`: held while a sequence changes its page tables, because other sequences may share the pages.
    - `abandoned`: page tables of garbage-collected sequences, and their extents. Finalizers can run at any point, so
      they only queue the tables here; `collect` releases the pages.
    - `max_bytes`: limit of the bytes of pages in use, None for the system's memory; may be set.
    - `log`: with `logs`, all changes of pages, for the other pipeline stages to follow; they take them out of it.
    """

    def __init__(self, layout: KVLayout, identity: str = "", *, logs: bool = False):
        self.layout, self.identity = layout, identity
        self.lock = fork_safe(threading.RLock())
        self.abandoned: deque[tuple[list[Table], list[int]]] = deque()
        self.max_bytes: int | None = None
        expect_room = functools.partial(_expect_room, weakref.ref(self))
        self.log: PageLog | None = PageLog() if logs else None
        self.groups = [
            Pages(group.page_bytes, expect_room, None if self.log is None else functools.partial(_append, self.log, g))
            for g, group in enumerate(layout.groups)
        ]

    def release(self, tables: Sequence[Table], extent: int) -> None:
        """Release the pages in the first `extent` slots of page tables."""
        for pages, table in zip(self.groups, tables, strict=True):
            for i in np.flatnonzero(table[:extent]):
                pages.release(table, int(i))

    def log_cells(self, group: int, page: int, source: int, lane: int, n: int, *, same_prefix: bool) -> None:
        """Log that cells of a page are copied from another, see `llamacli.kv.sequence.copy_cells`."""
        if self.log is not None:
            self.log.append((CELLS, group, page, source, lane | n << 8 | same_prefix << 16))

    def collect(self) -> None:
        """Release the pages of garbage-collected sequences."""
        while self.abandoned:
            with self.lock:
                if self.abandoned:  # another thread may have been faster
                    tables, (extent,) = self.abandoned[0]
                    self.release(tables, extent)
                    self.abandoned.popleft()

    @property
    def n_bytes(self) -> int:
        """Bytes requested from the system."""
        self.collect()
        return sum(pages.n_bytes for pages in self.groups)

    @property
    def n_used_bytes(self) -> int:
        """Bytes of the pages in use; shared pages count once."""
        self.collect()
        return sum(pages.n_used * pages.page_bytes for pages in self.groups)

    @property
    def free_bytes(self) -> int | None:
        """Bytes that pages may still take, None without a limit."""
        return None if self.max_bytes is None else max(0, self.max_bytes - self.n_used_bytes)


def _append(log: PageLog, group: int, change: int, page: int, source: int) -> None:
    log.append((change, group, page, source, 0))


def _expect_room(pool: weakref.ref[KVPool], n_bytes: int) -> None:
    owner = pool()
    if owner is not None and owner.max_bytes is not None:
        n_used = sum(pages.n_used * pages.page_bytes for pages in owner.groups)
        if n_used + n_bytes > owner.max_bytes:
            raise OutOfMemoryError(n_bytes, max(0, owner.max_bytes - n_used))

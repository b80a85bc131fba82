"""The memory behind every sequence of a model: pages with reference counts."""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import OutOfMemoryError
from llamacli.kv.layout import KVLayout
from llamacli.util.memory import anonymous, available

_SLAB_BYTES = 1 << 24
_APART = 33 * 64
"""Bytes between pages. At distances of a power of two, what a head reads of them would fight for the same lines of the
caches; and kernels read whole vectors, also where a row of values ends within one."""


Table = npt.NDArray[np.int64]


@attrs.define(eq=False)
class _Slab:
    """Memory for several pages. Those from `fresh` on have never been used; `free` are those given back."""

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
    """Pages of one size, by their addresses. Each is owned by as many sequences as its reference count says.

    Memory comes from the system in slabs, as it is needed, and goes back when a slab is empty. A page is all zeros when
    it is allocated. Methods may be called from any thread.

    Owners hold pages in slots of their tables. Books and slots change without a call in between, which is where
    Python lets an interrupt in: it finds both changed or neither.
    """

    def __init__(self, page_bytes: int):
        self.page_bytes = page_bytes
        self._stride = -(-page_bytes // 4096) * 4096 + _APART
        self._slab_pages = max(1, min(64, _SLAB_BYTES // self._stride))
        self._slabs: list[_Slab] = []  # by address
        self._owners: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def n_used(self) -> int:
        """Pages that some sequence owns."""
        return len(self._owners)

    @property
    def n_bytes(self) -> int:
        """Bytes that have been asked of the system."""
        return sum(slab.memory.nbytes for slab in self._slabs)

    def owners(self, page: int) -> int:
        """How many sequences own the page."""
        return self._owners.get(page, 0)

    def allocate(self, table: Table, i: int) -> None:
        """Put a page of zeros with one owner into an empty slot of a table. Raises OutOfMemoryError."""
        with self._lock:
            slab, page = self._vacant()
            if slab.free:
                ctypes.memset(page, 0, self.page_bytes)
            self._take(slab, page, table, i)

    def share(self, page: int, table: Table, i: int) -> None:
        """Put a page into an empty slot of a table too."""
        with self._lock:
            self._owners[page] += 1
            table[i] = page

    def own(self, table: Table, i: int) -> None:
        """See to it that the page in a slot has no other owner: a copy takes its place if it has."""
        with self._lock:
            page = int(table[i])
            if self._owners[page] > 1:
                slab, copy = self._vacant()
                if not slab.free:  # an interrupt may leave it half written, and what is fresh is taken to be zeros
                    slab.fresh += 1
                    slab.free += [copy]
                ctypes.memmove(copy, page, self.page_bytes)
                self._take(slab, copy, table, i)

    def release(self, table: Table, i: int) -> None:
        """Empty a slot of a table; its page can be allocated again if that was its last owner."""
        with self._lock:
            page = int(table[i])
            owners = self._owners[page] - 1
            at = bisect.bisect_right(self._slabs, page, key=lambda slab: slab.base) - 1
            slab = self._slabs[at]
            table[i] = 0
            if owners:
                self._owners[page] = owners
            else:
                del self._owners[page]
                slab.free.append(page)
                if not slab.n_used:
                    del self._slabs[at]

    def _vacant(self) -> tuple[_Slab, int]:
        """A page that nobody owns, and its slab."""
        slab = next((slab for slab in self._slabs if slab.free or slab.fresh < slab.n_pages), None)
        if slab is None:
            slab = _Slab(_memory(self._slab_pages * self._stride), self._slab_pages)
            bisect.insort(self._slabs, slab, key=lambda slab: slab.base)
        return slab, slab.free[-1] if slab.free else slab.base + slab.fresh * self._stride

    def _take(self, slab: _Slab, page: int, table: Table, i: int) -> None:
        """Put a vacant page into a slot; if there is one already, others own it too."""
        before = int(table[i])
        if before:
            self._owners[before] -= 1
        if slab.free:
            del slab.free[-1]
        else:
            slab.fresh += 1
        self._owners[page] = 1
        table[i] = page


def _memory(n_bytes: int) -> npt.NDArray[np.uint8]:
    there = available()
    try:
        if there is None or n_bytes <= there:
            return anonymous(n_bytes)
    except MemoryError:
        pass
    raise OutOfMemoryError(n_bytes, there or 0)


class KVPool:
    """The pages of all sequences of a model whose keys and values are kept as the same types.

    - `identity` tells the model from others: what one of another identity has computed means nothing to this one.
    - `lock` is held while a sequence changes which pages it owns, for others may be sharing them at the time.
    - `abandoned`: tables of sequences that the garbage collector has found, which may come in the middle of anything;
      they are given back when something next asks for memory.
    """

    def __init__(self, layout: KVLayout, identity: str = ""):
        self.layout, self.identity = layout, identity
        self.lock = threading.RLock()
        self.abandoned: deque[list[Table]] = deque()
        self.groups = [Pages(group.page_bytes) for group in layout.groups]

    def give_back(self, tables: Sequence[Table]) -> None:
        """Take an owner away from every page in the tables, one for each group of layers, which are empty then."""
        for pages, table in zip(self.groups, tables, strict=True):
            for i in np.flatnonzero(table):
                pages.release(table, int(i))

    def collect(self) -> None:
        """Give back the pages of sequences that nobody refers to any more."""
        while self.abandoned:
            with self.lock:
                if self.abandoned:  # another thread may be faster
                    self.give_back(self.abandoned[0])
                    self.abandoned.popleft()

    @property
    def n_bytes(self) -> int:
        """Bytes that have been asked of the system."""
        self.collect()
        return sum(pages.n_bytes for pages in self.groups)

    @property
    def n_used_bytes(self) -> int:
        """Bytes of the pages that some sequence owns, each counted once."""
        self.collect()
        return sum(pages.n_used * pages.page_bytes for pages in self.groups)

"""Reading of mapped matrices ahead of the kernels that use them.

Each pass over a model reads all of its matrices in the same order. The system's cache keeps what was used last, so of
a model that is larger than memory it would hold none when that is used again. Here the largest matrices that fit are
kept, the disk is told to read each other one before its use, and it is dropped from the cache afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from llamacli.engine.packed_copies.format import Bytes, checksum, units
from llamacli.kernels.faults import Watch
from llamacli.util.system import available_memory

WINDOW = 32 << 20
"""Most bytes that are read ahead of their use."""

_DROPPED = 16 << 20
"""Fewest bytes that are dropped at once: the system waits for all processors then."""

_CHOICE_S = 1.0
"""Seconds for which a choice of matrices to keep stands."""

_SLACK = 1.1
"""How many times as much memory as at the last choice makes a new one worthwhile."""


class MappedStack:
    """Stack of matrices in a mapped file, or one matrix.

    `data` is uint8 [n_group, n_tiles, n_blocks, block bytes], `place` its first byte in the `mapping`. `sums` are
    checksums of the units of each matrix, compared when it is first used; None where they need not be. `watch` is that
    over the file.
    """

    def __init__(self, data: Bytes, mapping: mmap.mmap, place: int, sums: Sequence[Sequence[str]] | None, watch: Watch):
        self.data, self.place = data, place
        self._mapping, self._sums, self._watch = mapping, sums, watch
        self._n_bytes = data[0].nbytes
        self._checked = [sums is None] * len(data)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(watch.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than `read` asks for

    def fetch(self, numbers: Sequence[int]) -> None:
        """Read some matrices ahead.

        Those that are used for the first time are checked. Raises FileChangedError for one that has changed; the copy
        is made again then, when the model is loaded.
        """
        for number in numbers:
            self.read(number)
        for number in numbers:
            self.check(number)

    def check(self, number: int) -> None:
        """Compare the sums of a matrix, once. Raises FileChangedError."""
        if self._sums is not None and not self._checked[number]:
            if [checksum(unit) for unit in units(self.data[number].reshape(-1))] != self._sums[number]:
                self._watch.lose()
            self._checked[number] = True

    def read(self, number: int) -> None:
        """Have the disk begin to read a matrix, no more."""
        descriptor, start, n_bytes = self._watch.descriptor, self.place + number * self._n_bytes, self._n_bytes
        if not hasattr(os, "posix_fadvise"):
            self._advise("MADV_WILLNEED", start, n_bytes)
            return
        step = _at_once(os.fstat(descriptor).st_dev)
        for at in range(start, start + n_bytes, step):
            os.posix_fadvise(descriptor, at, min(step, start + n_bytes - at), os.POSIX_FADV_WILLNEED)

    def drop(self) -> None:
        """Free the memory of all of it."""
        self._advise("MADV_DONTNEED", self.place, self.data.nbytes)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._watch.descriptor, self.place, self.data.nbytes, os.POSIX_FADV_DONTNEED)

    def _advise(self, advice: str, start: int, n_bytes: int) -> None:
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, advice):
            self._mapping.madvise(getattr(mmap, advice), begin, start + n_bytes - begin)


@attrs.define(eq=False)
class _Group:
    """Matrices that are used together."""

    stacks: Sequence[MappedStack]
    n_bytes: int
    is_read: bool = False
    is_kept: bool = False


class Reader:
    """Reader of a mapped copy, in the order of use."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._chosen_at, self._memory = float("-inf"), 0.0
        self._dropper = ThreadPoolExecutor(1, "llamacli-dropper")

    def add(self, stacks: Sequence[MappedStack]) -> int:
        """Append a group that a pass uses next; its number for `use`."""
        key = tuple(stack.place for stack in stacks)
        if key not in self._numbers:
            self._numbers[key] = len(self._groups)
            self._groups.append(_Group(stacks, sum(stack.data.nbytes for stack in stacks)))
        return self._numbers[key]

    def use(self, number: int) -> None:
        """Begin to read the group of a number and those behind.

        A group is checked at its first use. Raises FileChangedError.
        """
        group = self._groups[number]
        if number == 0 and time.monotonic() - self._chosen_at > _CHOICE_S:
            self._choose()
        if not (group.is_kept and group.is_read):
            ahead = self._ahead(number)
            for one in ahead:
                if not one.is_read:
                    one.is_read = True
                    for stack in one.stacks:
                        stack.read(0)
            unused = [one for one in self._groups if one.is_read and not one.is_kept and one not in ahead]
            if sum(one.n_bytes for one in unused) >= _DROPPED:
                for one in unused:
                    one.is_read = False
                self._dropper.submit(_drop, unused)
        for stack in group.stacks:
            stack.check(0)

    def _choose(self) -> None:
        """Choose what is kept: the largest that fit."""
        self._chosen_at = time.monotonic()
        free = available_memory(cached=True)
        memory = float("inf") if free is None else free - 2.0 * WINDOW
        kept = sum(group.n_bytes for group in self._groups if group.is_kept)
        if kept <= memory <= _SLACK * self._memory:
            return
        self._memory = memory
        for group in sorted(self._groups, key=lambda group: -group.n_bytes):
            group.is_kept = group.n_bytes <= memory
            memory -= group.n_bytes if group.is_kept else 0

    def _ahead(self, number: int) -> list[_Group]:
        """Groups used from there on that may be read ahead."""
        found, n_bytes = list[_Group](), 0
        for group in (*self._groups[number:], *self._groups[:number]):
            if group.is_kept and group.is_read:
                continue
            n_bytes += group.n_bytes
            if found and n_bytes > WINDOW:
                break
            found.append(group)
        return found


def _drop(groups: Sequence[_Group]) -> None:
    for group in groups:
        for stack in group.stacks:
            stack.drop()


@functools.cache
def _at_once(device: int) -> int:
    """Bytes that the system begins to read at one advice."""
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in disk / "queue", disk / "../queue":  # that of a partition is its disk's
        with contextlib.suppress(OSError, ValueError):
            return max(1, int((queue / "read_ahead_kb").read_text())) << 10
    return 128 << 10

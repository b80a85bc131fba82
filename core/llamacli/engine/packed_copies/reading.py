"""Reading of packed copies: checked, and mapped or read into memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from llamacli.engine.packed_copies.folder import folder, limit
from llamacli.engine.packed_copies.format import (
    HUGE_SHARE,
    UNIT,
    Bytes,
    DamagedError,
    Index,
    checksum,
    read_index,
    units,
)
from llamacli.engine.packed_copies.streaming import MappedStack
from llamacli.engine.placement import place
from llamacli.kernels.faults import Watch
from llamacli.util.files import SharedFileError, open_own, read_into
from llamacli.util.memory import advise_huge, anonymous, huge_share
from llamacli.util.numa import Node
from llamacli.util.system import huge_pages

_log = logging.getLogger(__name__)


class PackedCopy:
    """Mapped copy: packed tensors by their names.

    Its memory is the file's, shared with other processes, where the system maps it in huge pages, and where it does not
    fit into memory; else, and with several NUMA nodes, it is this process's own. It is freed with the last array.
    `stacks` are matrices that are not checked yet. `complete` is false once a tensor was not there. `watch` watches
    over the file, None where the memory is not the file's.
    """

    def __init__(
        self,
        tensors: Mapping[str, Bytes],
        stacks: Mapping[str, MappedStack] | None = None,
        watch: Watch | None = None,
    ):
        self._tensors, self.stacks, self.watch, self.complete = tensors, stacks or {}, watch, True

    def get(self, name: str, shape: Sequence[int]) -> Bytes | None:
        """Packed bytes of a tensor, read-only; None if they are not there."""
        found = self._tensors.get(name)
        if found is None or found.shape != tuple(shape):
            self.complete = False
            return None
        return found


def open_copy(key: str, n_threads: int = 1, nodes: Sequence[Node] = (), *, mapped: bool = False) -> PackedCopy | None:
    """Map the copy of a key and check it, with several threads.

    None if there is none, or none that can be believed: that is deleted, with a warning. `nodes` are NUMA nodes of the
    team's threads (`Team.nodes`): pages of a file cannot lie where each process wants them, so with several NUMA nodes
    the copy is read into memory, unless it is to stay `mapped`: then its tensors are checked when they are used.
    """
    base = folder()
    if base is None or not limit():
        return None
    path = base / f"{key}.packed"
    try:
        with open_own(path) as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data = np.frombuffer(mapping, np.uint8)
            index = read_index(data)
            if index.key != key:
                raise DamagedError("it is the copy of another model")
            watch = Watch(mapping, file.fileno(), path)
            is_file = True
            if not mapped and not nodes:
                advise_huge(mapping)
            if not mapped and (nodes or (huge_pages() in ("always", "madvise") and huge_share(data) < HUGE_SHARE)):
                data = _in_memory(file.fileno(), index, n_threads, nodes)
                is_file = False
        if mapped:
            entries = index.tensors.items()
            stacks = {name: MappedStack(one.of(data), mapping, one.start, one.sums, watch) for name, one in entries}
            tensors = {name: stack.data for name, stack in stacks.items()}
        else:
            stacks, tensors = {}, _checked(data, index, n_threads)
        watch.expect_whole()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: an empty file, and DamagedError
        if isinstance(error, SharedFileError) or getattr(error, "errno", None) == errno.ENOMEM:
            _log.info("the packed copy is not used: %s", error)
        else:
            _discard(path, str(error))
        return None
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # the other time is that of its bytes
    return PackedCopy(tensors, stacks, watch if is_file else None)


def _in_memory(descriptor: int, index: Index, n_threads: int, nodes: Sequence[Node]) -> Bytes:
    """Read a copy into memory with huge pages, of this process alone.

    With pages of 4 KiB, kernels would wait for the processor's address translation (TLB misses). Each thread reads its
    part by one call: other threads of Python run meanwhile.
    """
    data = anonymous(index.end)
    for entry in index.tensors.values():
        place(entry.of(data), nodes)

    def read(start: int, end: int) -> None:
        while start < end:
            n_read = read_into(descriptor, memoryview(cast(Any, data))[start:end], start)
            if not n_read:
                raise DamagedError("it is cut short")
            start += n_read

    edges = [index.end * i // n_threads // UNIT * UNIT for i in range(n_threads)] + [index.end]
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(read, edges, edges[1:]))
    data.flags.writeable = False
    return data


def _discard(path: Path, reason: str) -> None:
    _log.warning("the packed copy %s is made again: %s", path, reason)
    with contextlib.suppress(OSError):
        path.unlink()


def _checked(data: Bytes, index: Index, n_threads: int) -> dict[str, Bytes]:
    """Tensors of a copy.

    Raises DamagedError unless all are as they were written.
    """
    tensors = {name: entry.of(data) for name, entry in index.tensors.items()}
    pairs = [
        unit
        for name, entry in index.tensors.items()
        for group, sums in zip(tensors[name], entry.sums, strict=True)
        for unit in zip(units(group.reshape(-1)), sums, strict=True)
    ]
    with ThreadPoolExecutor(n_threads) as threads:  # NumPy adds without the GIL
        if not all(threads.map(lambda unit: checksum(unit[0]) == unit[1], pairs)):
            raise DamagedError("its bytes have changed")
    return tensors

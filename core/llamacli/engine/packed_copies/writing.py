"""Writing of packed copies, in the background or by packing into them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llamacli.engine.packed_copies.folder import VARIABLE, evict, folder, limit
from llamacli.engine.packed_copies.format import (
    ALIGNMENT,
    DATA_START,
    HUGE_SHARE,
    UNIT,
    Bytes,
    Entry,
    checksum,
    paged,
    units,
    write_index,
)
from llamacli.engine.packed_copies.streaming import MappedStack
from llamacli.errors import InvalidRequestError
from llamacli.kernels.faults import Watch, install_handler
from llamacli.kernels.matrix import Matrix
from llamacli.util.files import allocate, claimed, make_own_folder, open_own, remove_unclaimed, write_pieces
from llamacli.util.memory import huge_share
from llamacli.util.system import lower_priority

_log = logging.getLogger(__name__)

MIN_BYTES = 64 << 20
"""Bytes of packed weights from which a copy is worth its file: fewer are packed in a tenth of a second."""

_GRACE_S = 1.0
"""Seconds that the first tokens have all cores for themselves, unless the process ends before."""

_MAX_PIECES = 512
"""Arrays that are written at once; the system's limit is 1024."""


class NewCopy:
    """Copy that a model is packed into, tensor by tensor.

    So no more than one of them needs to be in memory. The file is mapped whole: `n_bytes` is the size of all
    tensors, with their padding to pages.
    """

    def __init__(self, file: BinaryIO, path: Path, model: Path, n_bytes: int):
        self._file, self._path, self._model, self._end = file, path, model, DATA_START
        allocate(file.fileno(), 0, DATA_START + n_bytes)  # a page without room on the disk would be SIGBUS
        self._mapping = mmap.mmap(file.fileno(), DATA_START + n_bytes)
        self._data = np.frombuffer(self._mapping, np.uint8)
        self.watch = Watch(self._mapping, file.fileno(), path)
        self._entries: dict[str, Entry] = {}

    def allocate(self, name: str, shape: Sequence[int]) -> Bytes:
        """Bytes of a tensor in the file, zeros in its packed shape."""
        entry = self._entries[name] = Entry(self._end, [*shape], [])
        self._end += paged(entry.n_bytes)
        return entry.of(self._data)

    def seal(self, name: str) -> MappedStack:
        """Write the bytes of a tensor, and free their memory.

        Returns them, read-only. Raises FileChangedError.
        """
        entry = self._entries[name]
        data = entry.of(self._data)
        entry.sums.extend([checksum(unit) for unit in units(group.reshape(-1))] for group in data)
        self._mapping.flush(entry.start, paged(entry.n_bytes))
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, entry.start, paged(entry.n_bytes))
        self.watch.renew()
        data.flags.writeable = False
        return MappedStack(data, self._mapping, entry.start, None, self.watch)

    def finish(self) -> None:
        """Write the index. Raises FileChangedError, OSError."""
        write_index(self._file, self._path, self._model, self._entries, len(self._mapping))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.watch.renew()


@contextlib.contextmanager
def new_copy(key: str, model: Path, n_bytes: int) -> Iterator[NewCopy]:
    """Copy that a model is packed into, and run from.

    `n_bytes` is the result of `packed_bytes`. An exception removes the file. Raises InvalidRequestError if it cannot be
    made: copies are off, the disk is full, or another process makes it.
    """
    base = folder()
    what = f"{model}: its weights take {n_bytes >> 20} MiB and are to be read from disk when they are used"
    if base is None or not limit():
        raise InvalidRequestError(f"{what}, but packed copies are off ({VARIABLE})")
    try:
        make_own_folder(base)
        remove_unclaimed(base)
        evict(max(0, limit() - n_bytes))
        free = shutil.disk_usage(base).free
        if free < n_bytes + UNIT:
            raise InvalidRequestError(f"{what}, but {base} has {free >> 20} MiB free")
        with claimed(base / f"{key}.packed") as file:
            if file is None:
                raise InvalidRequestError(f"{what}, but another process writes them to {base}: try again later")
            copy = NewCopy(file, base / f"{key}.packed", model, n_bytes)
            yield copy
            copy.finish()
    except OSError as error:
        raise InvalidRequestError(f"{what}, but {base} cannot be written: {error.strerror}") from error


_writers: set[_Writer] = set()


def save_copy(key: str, model: Path, matrices: Mapping[str, Matrix]) -> None:
    """Write the copy of a model in the background.

    Unless copies are off, or it is too small or too large. A model that is closed before all is written leaves none;
    `finish_copies` waits.
    """
    base, n_bytes = folder(), sum(matrix.packed.nbytes for matrix in matrices.values())
    others = limit() - DATA_START - n_bytes
    if base is None or n_bytes < MIN_BYTES or others < 0:
        return
    install_handler()  # compiled now, it is in the cache when the copy is mapped
    writer = _Writer(base / f"{key}.packed", model, matrices, others)
    _writers.add(writer)
    writer.start()


def finish_copies(seconds: float = 10.0) -> None:
    """Wait for copies that are being written, so long at the most."""
    end, writers = time.monotonic() + seconds, list(_writers)
    for writer in writers:
        writer.begins.set()
    for writer in writers:
        writer.join(max(0.0, end - time.monotonic()))


@atexit.register
def _stop_writers() -> None:
    finish_copies()
    for writer in list(_writers):
        writer.stopped.set()
        writer.join()


class _Blocks:
    """Writer of data in aligned blocks of UNIT bytes, without copies.

    Linux keeps what one such call writes in huge pages, where the file system can, and maps them as such.
    """

    def __init__(self, descriptor: int, start: int):
        self.end = start
        self._descriptor, self._pieces = descriptor, list[memoryview]()
        os.lseek(descriptor, start, os.SEEK_SET)

    def add(self, data: memoryview) -> None:
        """Append data, which may be written later."""
        while data:
            part = data[: UNIT - self.end % UNIT]
            self._pieces.append(part)
            self.end, data = self.end + len(part), data[len(part) :]
            if self.end % UNIT == 0 or len(self._pieces) >= _MAX_PIECES:
                self.flush()

    def flush(self) -> None:
        """Write all that was appended. Raises OSError."""
        while self._pieces:
            written = write_pieces(self._descriptor, self._pieces)
            while self._pieces and written >= len(self._pieces[0]):
                written -= len(self._pieces.pop(0))
            if written:
                self._pieces[0] = self._pieces[0][written:]


class _StoppedError(Exception):
    """Reason why a copy was not written to its end."""


class _Writer(threading.Thread):
    """Thread that writes a copy, with the lowest priority.

    It refers weakly to matrices: their memory is freed when the model is closed. Other copies may keep `others` bytes.
    """

    def __init__(self, path: Path, model: Path, matrices: Mapping[str, Matrix], others: int):
        super().__init__(name="llamacli-copy", daemon=True)
        self.begins, self.stopped = threading.Event(), threading.Event()
        self._path, self._model, self._others = path, model, others
        self._n_bytes = sum(matrix.packed.nbytes for matrix in matrices.values())
        self._matrices = {name: (weakref.ref(matrix), matrix.packed.shape) for name, matrix in matrices.items()}
        self._is_mixed = False  # partly in huge pages; a file system without them has none

    def run(self) -> None:
        lower_priority()
        self.begins.wait(_GRACE_S)
        if self.save() and self._is_mixed and not self.stopped.is_set():
            read_again(self._path)

    def save(self) -> bool:
        """Write the copy, or log why there is none."""
        try:
            self._save()
        except (OSError, _StoppedError) as error:
            _log.info("no packed copy of %s was written: %s", self._model, error)
            return False
        finally:
            _writers.discard(self)
        return True

    def _save(self) -> None:
        base = self._path.parent
        make_own_folder(base)
        remove_unclaimed(base)
        evict(self._others)
        if shutil.disk_usage(base).free < 2 * self._n_bytes:
            raise _StoppedError(f"{base} is on a disk that is nearly full")
        with claimed(self._path) as file:
            if file is None:
                raise _StoppedError("another process writes it")
            self._write(file)

    def _write(self, file: BinaryIO) -> None:
        tensors, blocks = {}, _Blocks(file.fileno(), DATA_START)
        for name, (matrix, shape) in self._matrices.items():
            entry = tensors[name] = Entry(blocks.end, [*shape], [])
            for group in range(shape[0]):
                sums: list[str] = []
                for first in range(0, math.prod(shape[1:]), UNIT):
                    unit = self._unit(matrix, group, first)
                    sums.append(checksum(unit))
                    blocks.add(unit.data)
                    del unit
                entry.sums.append(sums)
            blocks.add(memoryview(bytes(-entry.n_bytes % ALIGNMENT)))
        blocks.flush()
        write_index(file, self._path, self._model, tensors, blocks.end)
        file.flush()
        with contextlib.suppress(OSError):  # without room for a mapping, the copy is whole all the same
            share = huge_share(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))
            self._is_mixed = 0 < share < HUGE_SHARE

    def _unit(self, reference: weakref.ref[Matrix], group: int, first: int) -> Bytes:
        matrix = reference()
        if matrix is None or self.stopped.is_set():
            raise _StoppedError("the model was closed meanwhile")
        return matrix.packed[group].reshape(-1)[first : first + UNIT]


def read_again(path: Path) -> None:
    """Read a copy from disk again, into huge pages.

    What is written while free memory is in pieces lies in small pages, and each start would read all of it into memory
    of its own. It is read by calls: pages of a mapping that another process cuts would end this one.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), open_own(path) as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(UNIT):
                pass

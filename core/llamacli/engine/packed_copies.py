"""Packed copies of models: cache files, mapped at the next start.

Packing the weights of a file takes longer than reading it. So the packed bytes are written to a file in the background
once a model is loaded, and mapped read-only when the same file is loaded again: processes that map one copy share its
memory.

A copy is named by a digest of all that its bytes depend on: the model's files (device and path excepted), the mode, and
the sources of packing. All of it is checked before any of it is used, against sums that are computed at the speed of
memory. A copy that is not as it was written is made again. Nothing is lost with it: this is a cache, and failures to
write it are no errors.

A model that is larger than the free memory is run from its copy, which is written tensor by tensor while it is packed
(`NewCopy`). The system reads pages of it when they are used, and drops others. Experts are checked when they are first
used, and read ahead once the router has chosen them (`MappedStack`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import re
import shutil
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.placement import place
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.kernels.matrix import Matrix
from llamacli.util.files import (
    SharedFileError,
    allocate,
    claimed,
    make_own_folder,
    open_own,
    read_into,
    remove_unclaimed,
    write_pieces,
)
from llamacli.util.folders import cache_folder
from llamacli.util.memory import advise_huge, anonymous, huge_share
from llamacli.util.numa import Node
from llamacli.util.settings import LoadMode
from llamacli.util.system import available_memory, huge_pages, lower_priority

_log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

VARIABLE = "LLAMACLI_PACKED_CACHE"
"""Environment variable with the limit of all copies together, such as 20G; 0: no copies."""

DEFAULT_LIMIT = 16 << 30

MIN_BYTES = 64 << 20
"""Bytes of packed weights from which a copy is worth its file: fewer are packed in a tenth of a second."""

UNUSED_S = 30 * 24 * 3600
"""Seconds without use after which a copy is deleted."""

_MAGIC = b"llamacli packed3"
_PREFIX = struct.Struct("<16s32sQQ")
"""Magic number with version; SHA-256 of the index, its offset and its length. The index is JSON and ends the file."""

_DATA_START, _ALIGNMENT = 1 << 21, 64
"""Places of the first tensor, and of the others: huge pages, and cache lines."""

_UNIT = 1 << 24
"""Bytes of a tensor that have a sum of their own, and of a file that are written at once."""

_MAX_PIECES = 512
"""Arrays that are written at once; the system's limit is 1024."""

_HUGE_SHARE = 0.85
"""Share of a copy in huge pages from which it is used where the file system has it, and not read into memory."""

_SHARE = 0.85
"""Share of the free memory that weights may take; the rest is for caches and buffers."""

_COLUMNS = 2039
"""Words that a sum adds side by side: a prime, so that moved pages of the file change it."""

_SIZE = re.compile(r"(\d+)([KMGT]?)", re.ASCII)


# --- names -----------------------------------------------------------------------------------------------------------


def limit() -> int:
    """Limit of all copies together in bytes; 0: no copies.

    Raises InvalidRequestError if LLAMACLI_PACKED_CACHE is not a size.
    """
    given = os.environ.get(VARIABLE, "")
    if not given:
        return DEFAULT_LIMIT
    found = _SIZE.fullmatch(given.upper())
    if found is None:
        raise InvalidRequestError(f"{VARIABLE} = {given!r} is not a size such as 500M, 20G or 0")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def copy_key(files: Iterable[Path], identity: str, mode: str) -> str:
    """Name of a copy: digest of all that its bytes depend on.

    `files` are the model's, `identity` is the digest of their metadata and of the ends of their tensors. Raises
    OSError.
    """
    stats = [(file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns) for file in map(os.stat, files)]
    return hashlib.sha256(repr((stats, identity, mode, sources_digest(), sys.byteorder)).encode()).hexdigest()[:32]


@functools.cache
def sources_digest() -> str:
    """Digest of the sources that decide the bytes of copies."""
    package = Path(__file__).parents[1]
    packing = sorted((package / "kernels").glob("*packing*.py"))
    sources = [
        Path(__file__),
        package / "engine/weights.py",
        *packing,
        *sorted((package / "quantization").glob("*.py")),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources)).hexdigest()


def folder() -> Path | None:
    """Folder of the copies; None for a user without a home."""
    cache = cache_folder()
    return cache and cache / "packed"


# --- reading ---------------------------------------------------------------------------------------------------------


class PackedCopy:
    """Mapped copy: packed tensors by their names.

    Its memory is the file's, shared with other processes, where the system maps it in huge pages, and where it does not
    fit into memory; else, and with several NUMA nodes, it is this process's own. It is freed with the last array.
    `stacks` are experts that are not checked yet. `complete` is false once a tensor was not there.
    """

    def __init__(self, tensors: Mapping[str, Bytes], stacks: Mapping[str, MappedStack] | None = None):
        self._tensors, self.stacks, self.complete = tensors, stacks or {}, True

    def get(self, name: str, shape: Sequence[int]) -> Bytes | None:
        """Packed bytes of a tensor, read-only; None if they are not there."""
        found = self._tensors.get(name)
        if found is None or found.shape != tuple(shape):
            self.complete = False
            return None
        return found


class MappedStack:
    """Stack of matrices in a mapped file, such as experts.

    `data` is uint8 [n_group, n_tiles, n_blocks, block bytes], `place` its first byte in the `mapping`. `sums` are
    checksums of the units of each matrix, compared when it is first used; None where they need not be.
    """

    def __init__(self, data: Bytes, mapping: mmap.mmap, place: int, sums: Sequence[Sequence[str]] | None, path: Path):
        self._data, self._mapping, self._place, self._sums, self._path = data, mapping, place, sums, path
        self._checked = np.full(len(data), sums is None)

    def fetch(self, numbers: Iterable[int]) -> None:
        """Read some matrices ahead.

        Tensors are checked when they are used for the first time. Raises ModelFormatError for one that has changed; the
        copy is made again then, when the model is loaded.
        """
        n_bytes = self._data[0].nbytes
        for number in numbers:
            start = self._place + number * n_bytes
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            if hasattr(mmap, "MADV_WILLNEED"):
                self._mapping.madvise(mmap.MADV_WILLNEED, begin, start + n_bytes - begin)
        for number in numbers:
            if self._sums is not None and not self._checked[number]:
                if [_sum(unit) for unit in _units(self._data[number].reshape(-1))] != self._sums[number]:
                    _discard(self._path, "its bytes have changed")
                    raise ModelFormatError(f"the packed copy {self._path} has changed: load the model again")
                self._checked[number] = True


class _DamagedError(ValueError):
    """Reason why a copy cannot be used."""


def open_copy(
    key: str, n_threads: int = 1, nodes: Sequence[Node] = (), load: LoadMode = LoadMode.MEMORY
) -> PackedCopy | None:
    """Map the copy of a key and check it, with several threads.

    None if there is none, or a damaged one, which is deleted with a warning. `nodes` are the
    NUMA nodes of the team's threads (`Team.nodes`): pages of a file cannot lie where each process wants them, so with
    several NUMA nodes the copy is read into memory. Where `load` asks for it, or the copy is larger than the free
    memory, it is not: then experts are checked when they are used. Raises InvalidRequestError for one that must fit
    into memory and does not.
    """
    base = folder()
    if base is None or not limit():
        return None
    path = base / f"{key}.packed"
    try:
        with open_own(path) as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data = np.frombuffer(mapping, np.uint8)
            index = _read_index(data)
            if index.key != key:
                raise _DamagedError("it is the copy of another model")
            mapped = wants_map(load, index.end, Path(index.model))
            if not mapped and not nodes:
                advise_huge(mapping)
            if not mapped and (nodes or (huge_pages() in ("always", "madvise") and huge_share(data) < _HUGE_SHARE)):
                data = _in_memory(file.fileno(), index, n_threads, nodes)
        later = [name for name, entry in index.tensors.items() if mapped and entry.shape[0] > 1]
        tensors = _checked(data, index, n_threads, later)
        stacks = {
            name: MappedStack(tensors[name], mapping, index.tensors[name].start, index.tensors[name].sums, path)
            for name in later
        }
        copy = PackedCopy(tensors, stacks)
    except FileNotFoundError:
        return None
    except SharedFileError as error:
        _log.info("the packed copy is not used: %s", error)
        return None
    except InvalidRequestError:  # the memory is too small, and the copy is whole
        raise
    except (OSError, ValueError) as error:  # ValueError: an empty file, and _DamagedError
        _discard(path, str(error))
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return copy


def _in_memory(descriptor: int, index: _Index, n_threads: int, nodes: Sequence[Node]) -> Bytes:
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
                raise _DamagedError("it is cut short")
            start += n_read

    edges = [index.end * i // n_threads // _UNIT * _UNIT for i in range(n_threads)] + [index.end]
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(read, edges, edges[1:]))
    data.flags.writeable = False
    return data


def _discard(path: Path, reason: str) -> None:
    _log.warning("the packed copy %s is made again: %s", path, reason)
    with contextlib.suppress(OSError):
        path.unlink()


def _checked(data: Bytes, index: _Index, n_threads: int, later: Sequence[str] = ()) -> dict[str, Bytes]:
    """Tensors of a copy.

    Raises _DamagedError unless all are as they were written, but for those that are checked `later`.
    """
    tensors = {name: entry.of(data) for name, entry in index.tensors.items()}
    units = [
        unit
        for name, entry in index.tensors.items()
        if name not in later
        for group, sums in zip(tensors[name], entry.sums, strict=True)
        for unit in zip(_units(group.reshape(-1)), sums, strict=True)
    ]
    with ThreadPoolExecutor(n_threads) as threads:  # NumPy adds without the GIL
        if not all(threads.map(lambda unit: _sum(unit[0]) == unit[1], units)):
            raise _DamagedError("its bytes have changed")
    return tensors


@attrs.frozen
class _Entry:
    """Place of a tensor in a copy.

    Packed shape, and the sums of the units of each matrix.
    """

    start: int
    shape: list[int]
    sums: list[list[str]]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape)

    def of(self, data: Bytes) -> Bytes:
        """The tensor in a copy's bytes, in its packed shape."""
        return data[self.start : self.start + self.n_bytes].reshape(self.shape)


@attrs.frozen
class _Index:
    """Index of a copy: its key, its model's path, its tensors."""

    key: str
    model: str
    tensors: dict[str, _Entry]

    @property
    def end(self) -> int:
        """Place behind the last tensor."""
        return max((entry.start + entry.n_bytes for entry in self.tensors.values()), default=0)

    def as_json(self) -> bytes:
        return json.dumps(attrs.asdict(self)).encode()


def _read_index(data: Bytes) -> _Index:
    """Index of a copy.

    Raises _DamagedError, also for places that are not in the file.
    """
    if len(data) < _PREFIX.size:
        raise _DamagedError("it is cut short")
    magic, digest, start, length = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != _MAGIC:
        raise _DamagedError("it is of another version")
    if start + length != len(data):
        raise _DamagedError("it has not the size that it was written with")
    text = data[start:].tobytes()
    if hashlib.sha256(text).digest() != digest:
        raise _DamagedError("its index has changed")
    try:
        return _parsed(json.loads(text), start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _DamagedError(f"its index is malformed: {type(error).__name__}") from error


def _parsed(found: Any, end: int) -> _Index:
    tensors = {}
    for name, fields in found["tensors"].items():
        if not (isinstance(fields["shape"], list) and isinstance(fields["sums"], list)):
            raise TypeError(name)
        entry = _Entry(fields["start"], fields["shape"], fields["sums"])
        if not all(type(number) is int and number >= 0 for number in (entry.start, *entry.shape)):
            raise ValueError(name)
        if entry.start % _ALIGNMENT:
            raise ValueError(name)
        if len(entry.shape) != 4 or not 0 <= entry.start <= entry.start + entry.n_bytes <= end:
            raise ValueError(name)
        n_units = -(-math.prod(entry.shape[1:]) // _UNIT)
        if [len(sums) for sums in entry.sums] != [n_units] * entry.shape[0]:
            raise ValueError(name)
        tensors[name] = entry
    return _Index(str(found["key"]), str(found["model"]), tensors)


def _units(data: Bytes) -> Iterator[Bytes]:
    for start in range(0, len(data), _UNIT):
        yield data[start : start + _UNIT]


def _sum(data: Bytes) -> str:
    """Checksum of some bytes, as fast as memory is read.

    Words are added in columns: one changed bit or byte always changes it, anything else all but certainly. It protects
    from faults, not from forgery, as no other user can write to the folder.
    """
    n_words = len(data) // 8 // _COLUMNS * _COLUMNS
    columns = np.add.reduce(data[: 8 * n_words].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return hashlib.blake2b(columns.tobytes() + data[8 * n_words :].tobytes(), digest_size=8).hexdigest()


# --- models that do not fit into memory ------------------------------------------------------------------------------


def wants_map(load: LoadMode, n_bytes: int, model: Path) -> bool:
    """Decide whether weights of `n_bytes` stay on disk.

    Raises InvalidRequestError for weights that shall be in memory and do not fit.
    """
    free = available_memory()
    fits = free is None or n_bytes <= _SHARE * free
    if load is LoadMode.MEMORY and not fits:
        raise InvalidRequestError(
            f"{model}: its weights take {n_bytes >> 20} MiB, and {(free or 0) >> 20} MiB of memory are free: "
            "--load map reads them from disk when they are used"
        )
    if load is LoadMode.AUTO and not fits:
        _log.warning(
            "%s: the weights take %d MiB, and %d MiB of memory are free: they are read from disk when they are used",
            model, n_bytes >> 20, (free or 0) >> 20,
        )  # fmt: skip
    return load is LoadMode.MAP or (load is LoadMode.AUTO and not fits)


class NewCopy:
    """Copy that a model is packed into, tensor by tensor.

    So no more than one of them needs to be in memory.
    """

    def __init__(self, file: BinaryIO, path: Path, model: Path):
        self._file, self._path, self._model, self._end = file, path, model, _DATA_START
        self._entries: dict[str, _Entry] = {}
        self._open: dict[str, tuple[mmap.mmap, Bytes]] = {}

    def allocate(self, name: str, shape: Sequence[int]) -> Bytes:
        """Bytes of a tensor in the file, zeros in its packed shape.

        Raises OSError if the disk is full.
        """
        start, n_bytes = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY, math.prod(shape)
        allocate(self._file.fileno(), start, n_bytes)  # a page without room on the disk would be SIGBUS
        mapping = mmap.mmap(self._file.fileno(), n_bytes, offset=start)
        data = np.frombuffer(mapping, np.uint8).reshape(shape)
        self._entries[name], self._open[name], self._end = _Entry(start, [*shape], []), (mapping, data), start + n_bytes
        return data

    def seal(self, name: str) -> MappedStack | None:
        """Write the bytes of a tensor, and free their memory.

        Returns the stack of a tensor with several matrices.
        """
        mapping, data = self._open.pop(name)
        self._entries[name].sums.extend([_sum(unit) for unit in _units(group.reshape(-1))] for group in data)
        mapping.flush()
        if hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)
        data.flags.writeable = False
        return MappedStack(data, mapping, 0, None, self._path) if len(data) > 1 else None

    def finish(self) -> None:
        """Write the index."""
        _write_index(self._file, self._path, self._model, self._entries, self._end)


@contextlib.contextmanager
def new_copy(key: str, model: Path, n_bytes: int) -> Iterator[NewCopy]:
    """Copy that a model of `n_bytes` is packed into, and run from.

    An exception removes the file. Raises InvalidRequestError if it cannot be made: copies are off, the disk is full, or
    another process makes it.
    """
    base = folder()
    what = f"{model}: its weights take {n_bytes >> 20} MiB and are to be read from disk when they are used"
    if base is None or not limit():
        raise InvalidRequestError(f"{what}, but packed copies are off ({VARIABLE})")
    try:
        make_own_folder(base)
        remove_unclaimed(base)
        _evict(max(0, limit() - n_bytes))
        free = shutil.disk_usage(base).free
        if free < n_bytes + _UNIT:
            raise InvalidRequestError(f"{what}, but {base} has {free >> 20} MiB free")
        with claimed(base / f"{key}.packed") as file:
            if file is None:
                raise InvalidRequestError(f"{what}, but another process writes them to {base}: try again later")
            copy = NewCopy(file, base / f"{key}.packed", model)
            yield copy
            copy.finish()
    except OSError as error:
        raise InvalidRequestError(f"{what}, but {base} cannot be written: {error.strerror}") from error


# --- writing ---------------------------------------------------------------------------------------------------------

_writers: set[_Writer] = set()


def save_copy(key: str, model: Path, matrices: Mapping[str, Matrix]) -> None:
    """Write the copy of a model in the background.

    Unless copies are off, or it is too small or too large. A model that is closed before all is written leaves none;
    `finish_copies` waits.
    """
    base, n_bytes = folder(), sum(matrix.packed.nbytes for matrix in matrices.values())
    others = limit() - _DATA_START - n_bytes
    if base is None or n_bytes < MIN_BYTES or others < 0:
        return
    writer = _Writer(base / f"{key}.packed", model, matrices, others)
    _writers.add(writer)
    writer.start()


def finish_copies(seconds: float = 10.0) -> None:
    """Wait for copies that are being written, so long at the most."""
    end = time.monotonic() + seconds
    for writer in list(_writers):
        writer.join(max(0.0, end - time.monotonic()))


@atexit.register
def _stop_writers() -> None:
    finish_copies()
    for writer in list(_writers):
        writer.stopped.set()
        writer.join()


class _Blocks:
    """Writer of data in aligned blocks of _UNIT bytes, without copies.

    Linux keeps what one such call writes in huge pages, where the file system can, and maps them as such.
    """

    def __init__(self, descriptor: int, start: int):
        self.end = start
        self._descriptor, self._pieces = descriptor, list[memoryview]()
        os.lseek(descriptor, start, os.SEEK_SET)

    def add(self, data: memoryview) -> None:
        """Append data, which may be written later."""
        while data:
            part = data[: _UNIT - self.end % _UNIT]
            self._pieces.append(part)
            self.end, data = self.end + len(part), data[len(part) :]
            if self.end % _UNIT == 0 or len(self._pieces) >= _MAX_PIECES:
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
        self.stopped = threading.Event()
        self._path, self._model, self._others = path, model, others
        self._n_bytes = sum(matrix.packed.nbytes for matrix in matrices.values())
        self._matrices = {name: (weakref.ref(matrix), matrix.packed.shape) for name, matrix in matrices.items()}
        self._is_mixed = False  # partly in huge pages; a file system without them has none

    def run(self) -> None:
        lower_priority()
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
        _evict(self._others)
        if shutil.disk_usage(base).free < 2 * self._n_bytes:
            raise _StoppedError(f"{base} is on a disk that is nearly full")
        with claimed(self._path) as file:
            if file is None:
                raise _StoppedError("another process writes it")
            self._write(file)

    def _write(self, file: BinaryIO) -> None:
        tensors, blocks = {}, _Blocks(file.fileno(), _DATA_START)
        for name, (matrix, shape) in self._matrices.items():
            entry = tensors[name] = _Entry(blocks.end, [*shape], [])
            for group in range(shape[0]):
                sums: list[str] = []
                for first in range(0, math.prod(shape[1:]), _UNIT):
                    unit = self._unit(matrix, group, first)
                    sums.append(_sum(unit))
                    blocks.add(unit.data)
                    del unit
                entry.sums.append(sums)
            blocks.add(memoryview(bytes(-entry.n_bytes % _ALIGNMENT)))
        blocks.flush()
        _write_index(file, self._path, self._model, tensors, blocks.end)
        file.flush()
        with contextlib.suppress(OSError):  # without room for a mapping, the copy is whole all the same
            share = huge_share(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))
            self._is_mixed = 0 < share < _HUGE_SHARE

    def _unit(self, reference: weakref.ref[Matrix], group: int, first: int) -> Bytes:
        matrix = reference()
        if matrix is None or self.stopped.is_set():
            raise _StoppedError("the model was closed meanwhile")
        return matrix.packed[group].reshape(-1)[first : first + _UNIT]


def read_again(path: Path) -> None:
    """Read a copy from disk again, into huge pages.

    What is written while free memory is in pieces lies in small pages, and each start would read all of it into memory
    of its own. It is read by calls: pages of a mapping that another process cuts would end this one.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), open_own(path) as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(_UNIT):
                pass


def _write_index(file: BinaryIO, path: Path, model: Path, tensors: dict[str, _Entry], end: int) -> None:
    """Write the index at `end`, behind the tensors, and then the prefix."""
    text = _Index(path.stem, str(model), tensors).as_json()
    file.seek(end)
    file.write(text)
    file.seek(0)
    file.write(_PREFIX.pack(_MAGIC, hashlib.sha256(text).digest(), end, len(text)))


# --- housekeeping ----------------------------------------------------------------------------------------------------


@attrs.frozen
class CopyInfo:
    """Copy in the cache folder.

    Its file, its model's path, its size in bytes and the time of its last use.
    """

    path: Path
    model: str
    n_bytes: int
    used: float


def copies() -> list[CopyInfo]:
    """List the copies of this user, the last used one last."""
    found, base = [], folder()
    with contextlib.suppress(OSError):
        for path in base.glob("*.packed") if base else ():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append(CopyInfo(path, _model_of(path), status.st_size, status.st_mtime))
    return sorted(found, key=lambda copy: copy.used)


def _model_of(path: Path) -> str:
    """Path of a copy's model; "" if it cannot be read."""
    try:
        return _read_index(np.memmap(path, np.uint8, "r")).model
    except ValueError:
        return ""


def remove_copies() -> int:
    """Delete all copies of this user.

    Returns the number of bytes. Models that are loaded keep theirs until they are closed.
    """
    base = folder()
    if base:
        remove_unclaimed(base)
    return sum(_remove(copy) for copy in copies())


def _evict(n_bytes: int) -> None:
    """Delete copies that have not been used for long.

    And the oldest ones, until the others have `n_bytes`.
    """
    kept = copies()
    total = sum(copy.n_bytes for copy in kept)
    for copy in kept:
        if total > n_bytes or time.time() - copy.used > UNUSED_S:
            total -= _remove(copy)


def _remove(copy: CopyInfo) -> int:
    try:
        copy.path.unlink()
    except OSError:
        return 0
    return copy.n_bytes

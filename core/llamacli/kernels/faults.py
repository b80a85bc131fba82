"""Mapped cache files that are cut while they are in use.

Reading a page of a mapping that the file no longer has, or that the disk cannot read, is the signal SIGBUS, which ends
the process. On Linux a handler replaces the rest of a watched mapping by zeros and notes it; the thread goes on, and
`Watch.expect_whole` raises before what it computed counts. Elsewhere only the file's size and time are compared. A file
that changed is deleted: it holds nothing that cannot be made again, and nothing shall map it again.

The handler is machine code: the thread may be a kernel's, without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import FileChangedError
from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import types
from llamacli.kernels.jit import Compiled
from llamacli.kernels.linker import own_symbols
from llamacli.kernels.switch import jit_disabled

_log = logging.getLogger(__name__)

_SLOTS = 1024
"""Mappings that are watched at once; the files of further ones are compared only."""

_START, _END, _FAULT = range(3)
_ROW_BYTES = 24

_MAP_FIXED, _SA_SIGINFO = 0x10, 4
"""Linux's MAP_FIXED and SA_SIGINFO, on all processors that kernels run on."""

_WATCHED = "llamacli_watched"
"""Symbol of the process's `_watched`."""

_i64 = types.int64


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Watched(ctypes.Structure):
    """Memory of the handler: -page size, the handler from before, the table."""

    _fields_ = (("page_mask", ctypes.c_int64), ("previous", _Action), ("table", ctypes.c_int64 * 3 * _SLOTS))


_PREVIOUS, _TABLE = _Watched.previous.offset, _Watched.table.offset
_watched = _Watched(page_mask=-mmap.PAGESIZE)
own_symbols[_WATCHED] = ctypes.addressof(_watched)


@ir.expose(_i64)
def _address_of_watched(b: ir.Builder) -> ir.Value:
    found = b.module.globals.get(_WATCHED) or ir.ir.GlobalVariable(b.module, ir.I8, _WATCHED)
    return b.ptrtoint(found, ir.I64)


@ir.expose(_i64, _i64)
def _read_int(b: ir.Builder, address: ir.Value) -> ir.Value:
    return b.sext(ir.load(b, address, ir.I32), ir.I64)


@ir.expose(_i64, _i64, _i64)
def _map_zeros(b: ir.Builder, address: ir.Value, n_bytes: ir.Value) -> ir.Value:
    """Replace pages by zeros; returns their address, another value if that fails."""
    pointer, protection = ir.I8.as_pointer(), ir.I32(mmap.PROT_READ | mmap.PROT_WRITE)
    flags = ir.I32(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED)
    place = b.inttoptr(address, pointer)
    return b.ptrtoint(ir.call(b, "mmap", pointer, place, n_bytes, protection, flags, ir.I32(-1), ir.I64(0)), ir.I64)


@ir.expose(types.void, _i64, _i64)
def _set_action(b: ir.Builder, number: ir.Value, action: ir.Value) -> None:
    pointer = ir.I8.as_pointer()
    ir.call(b, "sigaction", ir.I32, b.trunc(number, ir.I32), b.inttoptr(action, pointer), pointer(None))


def _handle_fault(number: int, info: int, _context: int) -> None:
    """Handle SIGBUS, which has the code and the address of `siginfo_t`.

    A fault elsewhere is raised again for the handler from before, as its instruction is executed again. A signal that
    was sent (`faulthandler` does so after its report) is none of memory, and nothing is done.
    """
    if _read_int(info + 8) <= 0:
        return
    watched, address = _address_of_watched(), simd.read_i64(info + 16)
    for i in range(_SLOTS):
        row = watched + _TABLE + _ROW_BYTES * i
        start, end = simd.read_i64(row + 8 * _START), simd.read_i64(row + 8 * _END)
        if start and start <= address < end:
            page = address & simd.read_i64(watched)
            if _map_zeros(page, end - page) == page:
                simd.write_i64(row + 8 * _FAULT, 1)
                return
            break
    _set_action(number, watched + _PREVIOUS)


_handler = Compiled(_handle_fault, "void(int32, int64, int64)") if sys.platform == "linux" else None


class Watch:
    """Watch over a mapping of a cache file, which it keeps alive.

    The mapping begins at the file's first byte. `descriptor` is that of the open file, which is duplicated: the file
    stays the same if another gets its name. Once it is found changed it is deleted, unless another has its name.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int, path: Path):
        self._mapping, self._path, self.descriptor = mapping, path, os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self._slot = _slot_of(mapping)
        self._state: tuple[int, int] | None = self._now()

    def renew(self) -> None:
        """Take the file's present state as the right one.

        Raises FileChangedError if it was cut meanwhile.
        """
        if self._state is not None and (now := self._now())[0] >= self._state[0]:
            self._state = now
        self.expect_whole()

    @property
    def is_whole(self) -> bool:
        """True as long as the file was neither cut nor written to."""
        if self._state is not None and (self._now() != self._state or (self._slot is not None and self._slot[_FAULT])):
            self._discard()
        return self._state is not None

    def expect_whole(self) -> None:
        """Raise FileChangedError if the file was cut or written to."""
        if not self.is_whole:
            raise FileChangedError(f"{self._path} was cut or changed while it was in use, or cannot be read")

    def lose(self) -> None:
        """Hold the file for changed from now on.

        Raises FileChangedError.
        """
        if self._state is not None:
            self._discard()
        self.expect_whole()

    def _discard(self) -> None:
        self._state = None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self.descriptor)):
                self._path.unlink()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns


def _slot_of(mapping: mmap.mmap) -> npt.NDArray[np.int64] | None:
    """Watch a mapping until it ends; its row of the handler's table.

    None without a handler or a free row.
    """
    table = install_handler()
    if table is None:
        return None
    free = np.flatnonzero(table[:, _START] == 0)
    if not len(free):
        _log.warning("more than %d mapped files: further ones are not watched", _SLOTS)
        return None
    slot: npt.NDArray[np.int64] = table[free[0]]
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    slot[_FAULT], slot[_END] = 0, start + -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
    slot[_START] = start  # now the handler finds it
    weakref.finalize(mapping, slot.fill, 0).atexit = False
    return slot


@functools.cache
def install_handler() -> npt.NDArray[np.int64] | None:
    """Install the handler; its table, int64 [_SLOTS, 3].

    None where there is none. Raises MemoryError.
    """
    if _handler is None or jit_disabled():
        return None
    action = _Action(handler=_handler.compile(), flags=_SA_SIGINFO)
    library: Any = ctypes.CDLL(None, use_errno=True)
    if library.sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(_watched.previous)):
        _log.warning("mapped files are not watched: %s", os.strerror(ctypes.get_errno()))
        return None
    return np.ctypeslib.as_array(_watched.table)

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
from llamacli.util.memory import LLVM_BYTES, expect_free

_log = logging.getLogger(__name__)

_SLOTS = 1024
"""Mappings that are watched at once; the files of further ones are compared only."""

_START, _END, _FAULT = range(3)

_MAP_FIXED, _SA_SIGINFO = 0x10, 4
"""Linux's MAP_FIXED and SA_SIGINFO, on all processors that kernels run on."""

_HANDLER = """
declare i8* @mmap(i8*, i64, i32, i32, i32, i64)
declare i32 @sigaction(i32, i8*, i8*)

define void @handle(i32 %number, i8* %info, i8* %context) {{
entry:
  %code_at = getelementptr i8, i8* %info, i64 8
  %code_word = bitcast i8* %code_at to i32*
  %code = load i32, i32* %code_word
  %is_sent = icmp sle i32 %code, 0
  br i1 %is_sent, label %done, label %look
look:
  %address_at = getelementptr i8, i8* %info, i64 16
  %address_word = bitcast i8* %address_at to i64*
  %address = load i64, i64* %address_word
  br label %slot
slot:
  %i = phi i64 [0, %look], [%following, %next]
  %offset = mul i64 %i, 24
  %start_at = add i64 %offset, {table}
  %start_word = inttoptr i64 %start_at to i64*
  %start = load atomic i64, i64* %start_word seq_cst, align 8
  %end_at = add i64 %start_at, 8
  %end_word = inttoptr i64 %end_at to i64*
  %end = load atomic i64, i64* %end_word seq_cst, align 8
  %is_behind = icmp uge i64 %address, %start
  %is_before = icmp ult i64 %address, %end
  %is_found = and i1 %is_behind, %is_before
  br i1 %is_found, label %replace, label %next
next:
  %following = add i64 %i, 1
  %is_last = icmp eq i64 %following, {slots}
  br i1 %is_last, label %pass, label %slot
replace:
  %page = and i64 %address, {page_mask}
  %page_pointer = inttoptr i64 %page to i8*
  %length = sub i64 %end, %page
  %mapped = call i8* @mmap(i8* %page_pointer, i64 %length, i32 {protection}, i32 {flags}, i32 -1, i64 0)
  %is_mapped = icmp eq i8* %mapped, %page_pointer
  br i1 %is_mapped, label %note, label %pass
note:
  %fault_at = add i64 %start_at, 16
  %fault_word = inttoptr i64 %fault_at to i64*
  store atomic i64 1, i64* %fault_word seq_cst, align 8
  br label %done
pass:
  %previous = inttoptr i64 {previous} to i8*
  %failed = call i32 @sigaction(i32 %number, i8* %previous, i8* null)
  br label %done
done:
  ret void
}}
"""
"""Handler in LLVM's language, with addresses of this process.

A fault elsewhere is raised again for the handler from before, as its instruction is executed again. A signal that was
sent (`faulthandler` does so after its report) is none of memory, and nothing is done.
"""


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


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
    table = _installed()
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
def _installed() -> npt.NDArray[np.int64] | None:
    """Install the handler; its table, int64 [_SLOTS, 3].

    None where there is none. Raises MemoryError.
    """
    if sys.platform != "linux":
        return None
    from llvmlite import binding

    expect_free(LLVM_BYTES, "to watch mapped files")
    table, previous, action = np.zeros((_SLOTS, 3), np.int64), _Action(), _Action()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    source = _HANDLER.format(
        table=table.ctypes.data, slots=_SLOTS, page_mask=-mmap.PAGESIZE, protection=mmap.PROT_READ | mmap.PROT_WRITE,
        flags=flags, previous=ctypes.addressof(previous),
    )  # fmt: skip
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    compiler = binding.create_mcjit_compiler(binding.parse_assembly(source), machine)
    compiler.finalize_object()
    action.handler, action.flags = compiler.get_function_address("handle"), _SA_SIGINFO
    library: Any = ctypes.CDLL(None, use_errno=True)
    if library.sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(previous)):
        _log.warning("mapped files are not watched: %s", os.strerror(ctypes.get_errno()))
        return None
    _kept.extend((compiler, previous, table))
    return table


_kept: list[Any] = []
"""What the handler refers to, until the process ends."""

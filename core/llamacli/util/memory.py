"""Arrays backed by mmap, freed when collected, and arrays over raw addresses."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

_HUGE = 1 << 21
_N_SAMPLES = 16
LLVM_BYTES = 32 << 20
"""Bytes of address space, besides the code's, that are free when LLVM links; it ends the process without memory.

Other threads may take some of it in between: stacks (8 MiB each), tables of a tokenizer.
"""

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Private, because shared mappings never get transparent huge pages."""


def anonymous(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros, uint8 [n_bytes], from an anonymous mapping.

    Memory is committed on first write, in huge pages where possible.
    Unlike NumPy's arrays they are never part of a heap that keeps freed memory. Raises MemoryError.
    """
    if not n_bytes:
        return np.zeros(0, np.uint8)
    try:
        pages = mmap.mmap(-1, n_bytes, **_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot get {n_bytes} bytes of memory: {error}") from None
    if n_bytes >= _HUGE:
        advise_huge(pages)
    return np.frombuffer(pages, np.uint8)


def huge_share(data: npt.NDArray[np.uint8], maps: Path = Path("/proc/self/smaps")) -> float:
    """Share of a mapped file in huge pages, by samples.

    0 where the system does not tell.
    """
    sample = data[:: max(_HUGE, len(data) // _N_SAMPLES)]
    sample.max()  # read, so that their pages are mapped
    try:
        text = maps.read_text()
    except OSError:
        return 0.0
    mapped = re.search(rf"^{data.ctypes.data:x}-.*?^FilePmdMapped: *(\d+) kB", text, re.MULTILINE | re.DOTALL)
    return min(1.0, (int(mapped[1]) << 10) / (len(sample) * _HUGE)) if mapped else 0.0


def advise_huge(pages: mmap.mmap) -> None:
    """Ask the system for huge pages.

    Some systems do not take the advice.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


def expect_free(n_bytes: int, purpose: str) -> None:
    """Raise MemoryError if the process cannot have `n_bytes` more.

    For libraries in other languages, which end the process instead.
    """
    try:
        mmap.mmap(-1, n_bytes).close()
    except OSError:
        raise MemoryError(f"there is none {purpose}") from None


def trim_heap() -> None:
    """Give freed memory of the heap back to the system (glibc's malloc_trim).

    Small arrays lie in the heap, which keeps its size otherwise. Other C libraries do so by themselves.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # macOS, musl; Windows
        return None
    function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    return function


_NOTHING = ctypes.c_char * 0


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of a contiguous, writable array, three times as fast as `ctypes.data`."""
    return ctypes.addressof(_NOTHING.from_buffer(cast(Any, array)))


def view(address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """The memory at an address, uint8 [n_bytes], which the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))

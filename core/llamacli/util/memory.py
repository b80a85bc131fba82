"""Memory of the system's own, which goes back to it as soon as nothing refers to it any more."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HUGE = 1 << 21
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Memory that could be shared with other processes would never come in huge pages."""


def anonymous(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros, uint8 [n_bytes], committed as they are first written to; in huge pages where the system has them.

    Unlike NumPy's own arrays they never lie in a heap that keeps freed memory. Raises MemoryError.
    """
    if not n_bytes:
        return np.zeros(0, np.uint8)
    try:
        pages = mmap.mmap(-1, n_bytes, **_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot get {n_bytes} bytes of memory: {error}") from None
    if n_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice only; some systems do not take it
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def available() -> int | None:
    """Bytes that this process can still get: the system's, or what its container's limit leaves. None if unknown."""
    found = []
    with contextlib.suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, IndexError, ValueError):  # "max", which is no number, is no limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        found.append(max(0, limit - used + int(cached)))
    return min(found, default=None)


def view(address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at an address as an array. Whoever owns them must outlive it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))

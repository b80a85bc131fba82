"""CPUs and memory, with the limits of affinity masks and cgroups."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

Number = TypeVar("Number", int, float)

ROOT = Path("/")
"""Functions take another directory in its place, below which they find `proc` and `sys`."""

# --- CPUs ------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Cores:
    """The CPUs that a process may use.

    - `logical`: CPUs in its affinity mask.
    - `physical`: cores that these belong to; two hardware threads of one core share its arithmetic.
    - `quota`: CPU time that its cgroups grant, in CPUs; None without a limit.
    """

    logical: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """Default number of threads: one per physical core, within the rounded-up quota."""
        return max(1, self.physical if self.quota is None else min(self.physical, math.ceil(self.quota)))


def allowed_cpus() -> list[int]:
    """CPUs in this process's affinity mask, in order."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return list(range(os.cpu_count() or 1))


def usable_cores(root: Path = ROOT) -> Cores:
    """CPUs that this process may use, by affinity mask and cgroups."""
    allowed = allowed_cpus()
    return Cores(len(allowed), _physical_cores(allowed, root), min(_limits(root, "cpu", _cpu_quota), default=None))


def _physical_cores(cpus: list[int], root: Path) -> int:
    """Number of cores of these CPUs; psutil counts the whole machine's."""
    topology = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    try:
        return len({siblings.read_text().strip() for siblings in topology})
    except OSError:
        import psutil

        return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))


def cpu_name(root: Path = ROOT) -> str:
    """The processor's model name, or "" if unknown."""
    found = re.search(r"^model name\s*:\s*(.*\S)", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else ""


def cpu_governor(root: Path = ROOT) -> str | None:
    """The frequency governor of the first CPU; None if unknown."""
    return _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None


def load_average() -> float | None:
    """The load average of the last minute; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def running_threads(root: Path = ROOT) -> int | None:
    """Runnable threads on the machine, the caller included; None if unknown."""
    found = re.match(r"(?:\S+ ){3}(\d+)/", _read(root / "proc" / "loadavg"))
    return (int(found[1]) or None) if found else None


def lower_priority() -> None:
    """Give the calling thread the lowest priority, on Linux; elsewhere nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


# --- memory ----------------------------------------------------------------------------------------------------------


def system_memory() -> tuple[int, int] | None:
    """Total and available memory of the machine in bytes; None if unknown."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, KeyError, psutil.Error):
        return None
    return memory.total, memory.available


def memory_limit(root: Path = ROOT) -> int | None:
    """Smallest memory limit of this process's cgroups in bytes, None without."""
    return min(_limits(root, "memory", _memory_limit), default=None)


def available_memory(root: Path = ROOT, *, cached: bool = False) -> int | None:
    """Bytes this process can still allocate, within cgroups' limits; None if unknown.

    With `cached`, file cache in use counts as free, too.
    """
    memory = system_memory()
    left = functools.partial(_memory_left, kinds=("inactive_file", "active_file") if cached else ("inactive_file",))
    return min([*(memory or ())[1:], *_limits(root, "memory", left)], default=None)


def memory_capacity(root: Path = ROOT) -> int | None:
    """Bytes of memory of the machine, within cgroups' limits; None if unknown."""
    memory = system_memory()
    return min([size for size in (memory and memory[0], memory_limit(root)) if size], default=None)


_REST = 256 << 20
"""Bytes of Python, kernels and buffers beside a model; for a smaller model as many as it has itself."""


def fits(n_bytes: int, available: int | None = None) -> bool | None:
    """True if a model of so many bytes fits into memory.

    None if the available memory is unknown.
    """
    available = available_memory() if available is None else available
    return None if available is None else n_bytes + min(_REST, n_bytes) <= available


def huge_pages(root: Path = ROOT) -> str | None:
    """Setting of transparent huge pages: always, madvise, never; None if unknown."""
    found = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def peak_rss(root: Path = ROOT) -> int | None:
    """Peak resident set size of this process in bytes; None if unknown."""
    # Linux's own file, because getrusage counts what the parent had when it forked.
    found = re.search(r"^VmHWM:\s*(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- cgroups: Linux Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst --------------------------------------------


def _limits(root: Path, controller: str, read: Callable[[Path], Number | None]) -> Iterator[Number]:
    for folder, top in _groups(root, controller):
        while True:
            # "max" is no number, and the topmost group has no file.
            with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
                limit = read(folder)
                if limit is not None:
                    yield limit
            if folder == top:
                break
            folder = folder.parent


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    memberships = _read(root / "proc/self/cgroup").splitlines()
    mounts = _read(root / "proc/self/mountinfo").splitlines()
    paths: dict[str, str] = {}
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or controller in options.split(",")):
            shown, place = mount.split(" ")[3:5]
            top = root / place.lstrip("/")
            below = Path(paths[kind])
            below = below.relative_to(shown) if below.is_relative_to(shown) and ".." not in below.parts else Path()
            yield top / below, top


def _cpu_quota(folder: Path) -> float | None:
    """CPU quota of one cgroup (v1 or v2), in CPUs."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / int(period) if int(quota) > 0 else None


def _memory_limit(folder: Path) -> int | None:
    """Memory limit of one cgroup (v1 or v2), in bytes."""
    try:
        limit = int((folder / "memory.max").read_text())
    except FileNotFoundError:
        limit = int((folder / "memory.limit_in_bytes").read_text())
    return limit if limit < 1 << 60 else None  # v1 writes "no limit" as a huge number


def _memory_left(folder: Path, kinds: Sequence[str]) -> int | None:
    """Bytes that a cgroup's limit leaves, with some file cache reclaimed."""
    limit = _memory_limit(folder)
    if limit is None:
        return None
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    reclaimable = sum(int(statistics.get(f"total_{kind}") or statistics[kind]) for kind in kinds)
    return max(0, limit - int(used) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

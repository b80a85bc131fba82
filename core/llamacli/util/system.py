"""What this process may use of the machine: CPUs by its affinity, the cores behind them, what its container grants."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

ROOT = Path("/")


@attrs.frozen
class Cores:
    """What a process may use.

    - `logical`: CPUs that it may run on, as the system counts them.
    - `physical`: the cores that these belong to; two CPUs of one core share its arithmetic.
    - `quota`: how many CPUs' worth of time its control groups grant, or None without a limit.
    """

    logical: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """How many threads compute fastest: one a core, and no more than there is time for, rounded up."""
        return max(1, self.physical if self.quota is None else min(self.physical, math.ceil(self.quota)))


def usable_cores(root: Path = ROOT) -> Cores:
    """What this process may use. `root` is where the system's files about it begin."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not every system can say
        allowed = list(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            cores.add((root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return Cores(len(allowed), len(cores), min(_limits(root, "cpu", _quota), default=None))


def memory_limit(root: Path = ROOT) -> int | None:
    """How many bytes of memory this process's control groups grant, or None without a limit."""
    limit = min(_limits(root, "memory", _most_memory), default=None)
    return None if limit is None else int(limit)


def _limits(root: Path, controller: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """What `read` finds in the folder of each control group that this process is in, where a limit is set.

    Linux Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
    """
    for folder, top in _groups(root, controller):
        while True:
            # "max" is no number, and the topmost group has no file.
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                limit = read(folder)
                if limit is not None:
                    yield limit
            if folder == top:
                break
            folder = folder.parent


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """The folder of this process's group and the topmost one that can be seen, in each hierarchy that may limit it."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
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


def _quota(folder: Path) -> float | None:
    """One group's own limit of CPUs' worth of time, by the second version's file or the first version's two."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / int(period) if int(quota) > 0 else None


def _most_memory(folder: Path) -> float | None:
    """One group's own limit of memory; the first version has a number beyond all memory for none."""
    try:
        limit = int((folder / "memory.max").read_text())
    except FileNotFoundError:
        limit = int((folder / "memory.limit_in_bytes").read_text())
    return limit if limit < 1 << 60 else None

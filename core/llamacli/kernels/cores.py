"""What this process may use of the CPU: its affinity, the cores behind it, and the time that a container grants."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
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
    return Cores(len(allowed), len(cores), min(_quotas(root), default=None))


def _quotas(root: Path) -> Iterator[float]:
    """The limit of each control group that this process is in, as CPUs' worth of time, where one is set.

    Linux Documentation/admin-guide/cgroup-v1/cgroups.rst and cgroup-v2.rst.
    """
    for folder, top in _groups(root):
        while True:
            quota = _quota(folder)
            if quota is not None:
                yield quota
            if folder == top:
                break
            folder = folder.parent


def _groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """The folder of this process's group and the topmost one that can be seen, in each hierarchy that limits CPUs."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or "cpu" in options.split(",")):
            shown, place = mount.split(" ")[3:5]
            top = root / place.lstrip("/")
            below = Path(paths[kind])
            below = below.relative_to(shown) if below.is_relative_to(shown) and ".." not in below.parts else Path()
            yield top / below, top


def _quota(folder: Path) -> float | None:
    """One group's own limit."""
    try:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except FileNotFoundError:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number; the topmost group has no file
        return None

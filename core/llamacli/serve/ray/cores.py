"""Cores of replicas on one machine: whole NUMA nodes, and none twice.

A replica holds a lock file for its cores as long as it lives. The kernel releases it however the process ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from llamacli.util.numa import numa_nodes


def slots(nodes: list[list[int]], n_cpus: int) -> list[list[int]]:
    """Disjoint sets of `n_cpus` CPUs, of one node each where possible.

    Only a replica that is larger than every node gets CPUs of several.
    """
    if all(len(node) < n_cpus for node in nodes):
        nodes = [[cpu for node in nodes for cpu in node]]
    return [node[i : i + n_cpus] for node in nodes for i in range(0, len(node) - n_cpus + 1, n_cpus)]


class CoreLock:
    """Cores that this process has taken, `cpus`; empty if none were free."""

    def __init__(self, n_cpus: int, folder: Path | None = None, nodes: list[list[int]] | None = None):
        self.cpus: tuple[int, ...] = ()
        self._files: list[int] = []
        try:
            import fcntl
        except ImportError:  # Windows
            return
        folder = folder or Path(tempfile.gettempdir()) / f"llamacli-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for cpus in slots([[*node.cores] for node in numa_nodes()] if nodes is None else nodes, n_cpus):
            files: list[int] = []
            try:
                for cpu in cpus:
                    files.append(os.open(folder / f"{cpu}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
                    fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for file in files:
                    os.close(file)
                continue
            self._files, self.cpus = files, tuple(cpus)
            return

    def close(self) -> None:
        """Give the cores back."""
        for file in self._files:
            os.close(file)
        self._files, self.cpus = [], ()

    def pin(self) -> None:
        """Bind this thread, and those that it starts, to the cores."""
        if self.cpus:
            with contextlib.suppress(OSError):  # of a container that forbids it
                os.sched_setaffinity(0, self.cpus)

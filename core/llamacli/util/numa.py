"""NUMA nodes: usable CPUs of each, and threads bound to them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from llamacli.util.system import ROOT, allowed_cpus

VARIABLE = "LLAMACLI_NUMA"
"""Environment variable: 0 treats all nodes as one."""

_log = logging.getLogger(__name__)


@attrs.frozen
class Node:
    """NUMA node with CPUs that this process may use.

    - `number`: Linux's number of the node.
    - `cpus`: its CPUs in the affinity mask.
    - `cores`: the first of these of each physical core.
    """

    number: int
    cpus: tuple[int, ...]
    cores: tuple[int, ...]


def numa_nodes(root: Path = ROOT) -> list[Node]:
    """Nodes with usable CPUs; one node where the system names none.

    The affinity mask respects the cpuset of a cgroup. Nodes of memory alone are left out.
    """
    allowed = allowed_cpus()
    folders = {
        int(folder.name.removeprefix("node")): folder
        for folder in (root / "sys/devices/system/node").glob("node*")
        if folder.name.removeprefix("node").isdecimal()
    }
    try:
        listed = {number: _listed((folders[number] / "cpulist").read_text()) for number in sorted(folders)}
    except (OSError, ValueError):  # hidden or malformed
        listed = {}
    found = {number: [cpu for cpu in allowed if cpu in cpus] for number, cpus in listed.items()}
    if sum(map(len, found.values())) < len(allowed):
        found = {0: allowed}
    return [Node(number, tuple(cpus), _cores(cpus, root)) for number, cpus in found.items() if cpus]


def thread_nodes(n_threads: int, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Node of each thread of a team; empty if all have one.

    Threads are divided in proportion to the nodes' cores, neighbours on one node. LLAMACLI_NUMA = 0 makes it one node.
    """
    if os.environ.get(VARIABLE, "") == "0":
        return ()
    cores = [node for node in nodes for _ in node.cores]
    found = tuple(cores[(2 * thread + 1) * len(cores) // (2 * n_threads)] for thread in range(n_threads))
    return found if len(set(found)) > 1 else ()


def bind_thread(node: Node) -> bool:
    """Bind the calling thread to a node's CPUs; False if not allowed."""
    try:
        os.sched_setaffinity(0, node.cpus)
    except (AttributeError, OSError) as error:
        _log.debug("a thread cannot be bound to NUMA node %d: %s", node.number, error)
        return False
    return True


def _listed(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cores(cpus: Sequence[int], root: Path) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for cpu in cpus:
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        first.setdefault(siblings, cpu)
    return tuple(first.values())

"""Cores of replicas: NUMA nodes and locks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.serve.ray.cores import CoreLock, slots

linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity and flock are Linux's")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_slots_are_disjoint_and_within_nodes(sizes: list[int], n: int) -> None:
    first, nodes = 0, []
    for size in sizes:
        nodes.append(list(range(first, first + size)))
        first += size
    found = slots(nodes, n)
    cpus = [cpu for slot in found for cpu in slot]
    assert len(cpus) == len(set(cpus))
    assert all(len(slot) == n for slot in found)
    if n <= max(sizes):
        assert all(any(set(slot) <= set(node) for node in nodes) for slot in found)
        assert len(found) == sum(size // n for size in sizes)
    else:
        assert len(found) == sum(sizes) // n


@linux
def test_cores_are_taken_once_until_their_process_gives_them_back(tmp_path: Path) -> None:
    nodes = [[0, 1], [2, 3, 4]]
    locks = [CoreLock(2, tmp_path, nodes) for _ in range(3)]
    assert [lock.cpus for lock in locks] == [(0, 1), (2, 3), ()]
    locks[0].close()
    assert CoreLock(2, tmp_path, nodes).cpus == (0, 1)
    locks[2].pin()


@linux
def test_a_thread_is_bound_to_its_cores(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    lock = CoreLock(1, tmp_path)
    try:
        lock.pin()
        assert os.sched_getaffinity(0) == set(lock.cpus)
    finally:
        os.sched_setaffinity(0, before)
        lock.close()

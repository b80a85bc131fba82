"""NUMA nodes on simulated systems, and threads bound to nodes."""

import errno
import logging
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.util import numa
from llamacli.util.numa import Node, bind_thread, numa_nodes, thread_nodes

linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
ALL = Node(0, (0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3))


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch):
    """Set the affinity mask."""

    def allow(*cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)

    allow(0, 1, 2, 3, 4, 5, 6)
    return allow


@pytest.fixture
def system(tmp_path: Path, allowed):
    """Write lists of CPUs by node; CPU pairs 4 apart share cores."""

    def write(**nodes: str) -> Path:
        for name, listed in nodes.items():
            folder = tmp_path / "sys/devices/system/node" / name
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(listed + "\n")
        for cpu in range(8):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
        return tmp_path

    return write


def test_nodes_have_the_allowed_cpus_and_one_of_each_core(system, allowed) -> None:
    root = system(node0="0-1,4-5", node1="2-3,6-7", node10="8-9", node2="", nodes="junk")
    assert numa_nodes(root) == [Node(0, (0, 1, 4, 5), (0, 1)), Node(1, (2, 3, 6), (2, 3))]
    allowed(2, 7)
    assert numa_nodes(root) == [Node(1, (2, 7), (2, 7))]


@pytest.mark.parametrize("nodes", [{}, {"node0": "0-3"}, {"node0": "0-3", "node1": "?"}, {"online": "0-1"}])
def test_all_cpus_are_one_node_where_nodes_are_hidden_or_malformed(nodes, system) -> None:
    assert numa_nodes(system(**nodes)) == [ALL]


def test_one_node_without_affinity_masks(system, monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert numa_nodes(system()) == [ALL]


def test_nodes_of_this_machine_have_the_cpus_of_the_mask() -> None:
    cpus = [cpu for node in numa_nodes() for cpu in node.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else cpus)


def nodes_of(*sizes: int) -> list[Node]:
    cpus = [tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
    return [Node(i, own, own) for i, own in enumerate(cpus)]


@pytest.mark.parametrize(
    ("sizes", "n", "expected"),
    [
        ([4, 4], 8, "00001111"), ([4, 4], 3, "011"), ([4, 4], 2, "01"), ([4, 4], 10, "0000011111"), ([4, 4], 1, ""),
        ([6, 2], 4, "0001"), ([2, 2, 2, 2], 4, "0123"), ([8], 8, ""), ([15, 1], 2, ""),
    ],
)  # fmt: skip
def test_threads_are_divided_in_proportion_to_cores(sizes, n, expected) -> None:
    assert "".join(str(node.number) for node in thread_nodes(n, nodes_of(*sizes))) == expected


@given(st.lists(st.integers(1, 64), min_size=2, max_size=8), st.integers(1, 300))
def test_each_node_has_its_part_of_the_threads_side_by_side(sizes: list[int], n: int) -> None:
    found = [node.number for node in thread_nodes(n, nodes_of(*sizes))]
    assert found == sorted(found)
    if found:
        assert len(found) == n
        for number, size in enumerate(sizes):
            assert abs(found.count(number) - n * size / sum(sizes)) <= 1


def test_environment_makes_all_nodes_one(monkeypatch) -> None:
    monkeypatch.setenv(numa.VARIABLE, "0")
    assert thread_nodes(8, nodes_of(4, 4)) == ()
    monkeypatch.setenv(numa.VARIABLE, "")
    assert len(thread_nodes(8, nodes_of(4, 4))) == 8


@linux
def test_only_the_calling_thread_is_bound() -> None:
    before, found = os.sched_getaffinity(0), []

    def work() -> None:
        found.extend([bind_thread(Node(0, (min(before),), ())), os.sched_getaffinity(0)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, {min(before)}]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_threads_stay_where_they_are_if_binding_is_refused(code, monkeypatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    with caplog.at_level(logging.DEBUG, numa.__name__):
        assert not bind_thread(Node(3, (0,), (0,)))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", f"a thread cannot be bound to NUMA node 3: [Errno {code}] {os.strerror(code)}")
    ]
    monkeypatch.delattr(os, "sched_setaffinity")
    assert not bind_thread(Node(3, (0,), (0,)))

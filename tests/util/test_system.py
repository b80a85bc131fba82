"""Usable cores and memory, on simulated systems."""

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from llamacli.util.system import (
    Cores,
    available_memory,
    lower_priority,
    memory_limit,
    running_threads,
    system_memory,
    usable_cores,
)

V2 = "26 25 0:23 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 25 0:26 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:12 - cgroup cgroup rw,cpu,cpuacct\n"
    "31 25 0:27 {root} /sys/fs/cgroup/cpuset rw,nosuid shared:13 - cgroup cgroup rw,cpuset\n"
)
OTHER_MOUNT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write the files of a system whose affinity mask has `cpus`.

    With `smt` two of them are one core.
    """

    def write(cpus: int = 8, smt: bool = False, **files: str) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
        for cpu in range(cpus):
            topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            siblings = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if smt else str(cpu)
            (topology / "thread_siblings_list").write_text(siblings + "\n")
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def v2(path: str, **limits: str) -> dict[str, str]:
    """Files of a process in cgroup v2, with CPU limits by path."""
    groups = {f"sys__fs__cgroup__{group}cpu.max": text for group, text in limits.items()}
    return {"proc__self__cgroup": f"0::{path}\n", "proc__self__mountinfo": OTHER_MOUNT + V2, **groups}


def v1(path: str, root: str = "/", **limits: str) -> dict[str, str]:
    files = {
        "proc__self__cgroup": f"5:cpuset:/elsewhere\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n",
        "proc__self__mountinfo": OTHER_MOUNT + V1.format(root=root),
    }
    for group, text in limits.items():
        quota, period = text.split()
        files[f"sys__fs__cgroup__cpu,cpuacct__{group}cpu.cfs_quota_us"] = quota + "\n"
        files[f"sys__fs__cgroup__cpu,cpuacct__{group}cpu.cfs_period_us"] = period + "\n"
    return files


def test_hardware_threads_of_one_core_count_once(system) -> None:
    assert usable_cores(system(8, smt=True)) == Cores(8, 4, None)


def test_affinity_mask_limits_cores(system) -> None:
    assert usable_cores(system(3, smt=True)) == Cores(3, 2, None)


def test_cores_without_affinity_and_topology(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    for counted, physical in ((3, 3), (8, 6), (None, 6)):
        monkeypatch.setattr(psutil, "cpu_count", lambda logical, counted=counted: counted)
        assert usable_cores(tmp_path) == Cores(6, physical, None)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path).threads == 1


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        (v2("/", **{"": "max 100000\n"}), None, 8),
        (v2("/"), None, 8),
        (v2("/", **{"": "250000 100000\n"}), 2.5, 3),
        (v2("/", **{"": "20000 100000\n"}), 0.2, 1),
        (v2("/", **{"": "6400000 100000\n"}), 64.0, 8),
        (v2("/a/b", a__b__="max 100000", a__="150000 50000"), 3.0, 3),
        (v2("/a/b", a__b__="200000 100000", a__="400000 100000"), 2.0, 2),
        (v2("/not/there", **{"": "100000 100000"}), 1.0, 1),
        (v2("/../..", **{"": "100000 100000"}), 1.0, 1),
        (v2("/", **{"": "nonsense"}), None, 8),
        (v2("/", **{"": "1000 0"}), None, 8),
        (v1("/", **{"": "-1 100000"}), None, 8),
        (v1("/", **{"": "350000 100000"}), 3.5, 4),
        (v1("/docker/x", docker__x__="150000 100000"), 1.5, 2),
        (v1("/docker/x", root="/docker/x", **{"": "150000 100000"}), 1.5, 2),
        (v1("/docker/x", root="/docker/y", **{"": "300000 100000"}), 3.0, 3),
    ],
)
def test_cpu_quota_of_cgroups_rounded_up(system, files, quota, threads) -> None:
    cores = usable_cores(system(**files))
    assert (cores.quota, cores.threads) == (quota, threads)


def test_cores_of_this_machine(monkeypatch) -> None:
    cores = usable_cores()
    assert 1 <= cores.threads <= cores.physical <= cores.logical
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        assert usable_cores().threads == 1


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_lowest_priority_of_one_thread() -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def work() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize(
    ("text", "threads"),
    [("0.20 1.18 0.12 3/80 11206\n", 3), ("0.00 0.00 0.00 0/0 0\n", None), ("0.20 0.18\n", None), ("", None)],
)
def test_running_threads(system, text, threads) -> None:
    assert running_threads(system(proc__loadavg=text)) == threads


V2_FILES = {"proc__self__cgroup": "0::/a/b\n", "proc__self__mountinfo": OTHER_MOUNT + V2}
V1_FILES = {
    "proc__self__cgroup": "4:memory:/a\n",
    "proc__self__mountinfo": "30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
V1_FOLDER = "sys__fs__cgroup__memory__a__"


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        (V2_FILES, None, 5000),
        (V2_FILES | {"sys__fs__cgroup__a__memory.max": "max\n"}, None, 5000),
        (V2_FILES | {"sys__fs__cgroup__a__memory.max": "9000\n"}, 9000, 5000),
        (
            V2_FILES
            | {
                "sys__fs__cgroup__a__b__memory.max": "8000\n",
                "sys__fs__cgroup__a__memory.max": "4000\n",
                "sys__fs__cgroup__a__memory.current": "3000\n",
                "sys__fs__cgroup__a__memory.stat": "anon 1\ninactive_file 500\n",
            },
            4000,
            1500,
        ),
        (
            V1_FILES
            | {
                f"{V1_FOLDER}memory.limit_in_bytes": "4000\n",
                f"{V1_FOLDER}memory.usage_in_bytes": "3000\n",
                f"{V1_FOLDER}memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
            },
            4000,
            1200,
        ),
        (V1_FILES | {f"{V1_FOLDER}memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, None, 5000),
    ],
)
def test_memory_limits_of_cgroups(system, monkeypatch, files, limit, available) -> None:
    monkeypatch.setattr("llamacli.util.system.system_memory", lambda: (10000, 5000))
    root = system(**files)
    assert (memory_limit(root), available_memory(root)) == (limit, available)


def test_memory_of_this_machine(monkeypatch) -> None:
    total, available = system_memory()
    assert 0 < available <= total
    assert 0 < available_memory() <= total

    def unknown() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", unknown)
    assert system_memory() is None

"""Mapped files that are cut while they are in use."""

import mmap
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from llamacli.errors import FileChangedError
from llamacli.kernels.faults import Watch

PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux", reason="the handler is Linux's")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8 * PAGE)
    return path


def watched(path: Path) -> tuple[np.ndarray, Watch]:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapping, np.uint8), Watch(mapping, file.fileno(), path)


def test_a_whole_file_is_no_error(path: Path) -> None:
    data, watch = watched(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns))  # the time of the last use
    watch.expect_whole()
    assert (data == ord("x")).all()


def test_a_replaced_file_stays_what_it_was(path: Path) -> None:
    data, watch = watched(path)
    path.with_name("other").write_bytes(b"y")
    path.with_name("other").replace(path)
    assert (data == ord("x")).all()
    watch.expect_whole()


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_changed_file_is_named(change: str, path: Path) -> None:
    _, watch = watched(path)
    if change == "cut":
        os.truncate(path, 8 * PAGE - 1)  # within the last page, which has no fault
    else:
        path.write_bytes(b"y" * 8 * PAGE)
    with pytest.raises(FileChangedError, match=rf"^{path} was cut or changed while it was in use"):
        watch.expect_whole()
    assert not path.exists()  # nothing maps it again


def test_a_file_in_the_place_of_a_changed_one_is_kept(path: Path) -> None:
    _, watch = watched(path)
    with path.open("r+b") as changed:
        path.with_name("other").write_bytes(b"y")
        path.with_name("other").replace(path)
        changed.truncate(0)
    with pytest.raises(FileChangedError):
        watch.expect_whole()
    assert path.read_bytes() == b"y"


@linux
def test_pages_that_are_gone_are_zeros(path: Path) -> None:
    (data, watch), (others, other) = watched(path), watched(path)
    os.truncate(path, 2 * PAGE)
    with ThreadPoolExecutor(4) as threads:
        sums = [*threads.map(np.sum, [data] * 4)]
    assert sums == [2 * PAGE * ord("x")] * 4
    os.truncate(path, 8 * PAGE)  # whole again, and yet not what it was
    for one in (watch, other):
        with pytest.raises(FileChangedError):
            one.expect_whole()
    del data, watch
    assert others[:PAGE].all()


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    begin = """
        import ctypes, faulthandler, mmap, os, signal, sys
        from pathlib import Path
        import numpy as np
        from llamacli.kernels.faults import Watch
        path = Path(sys.argv[1])
        def mapped():
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return np.frombuffer(mapping, np.uint8), mapping, os.dup(file.fileno())
        """
    program = textwrap.dedent(begin) + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, capture_output=True, text=True, check=False
    )


@linux
@pytest.mark.medium
def test_faults_of_other_mappings_end_the_process(path: Path) -> None:
    """Also those at addresses that a watched mapping had."""
    done = run(
        """
        data, mapping, descriptor = mapped()
        address = data.ctypes.data
        watch = Watch(mapping, descriptor, path)
        del data, mapping, watch
        data, mapping, descriptor = mapped()
        print(data.ctypes.data == address, flush=True)
        os.truncate(path, 0)
        data.sum()
        """,
        path,
    )
    assert done.returncode == -7
    assert done.stdout == "True\n"


@linux
@pytest.mark.medium
@pytest.mark.parametrize("when", ["before", "after"])
def test_reports_of_faults_go_on(when: str, path: Path) -> None:
    """The handler of `faulthandler` lies under ours, or over it."""
    code = """
        if "{when}" == "before":
            faulthandler.enable()
        data, mapping, descriptor = mapped()
        watch = Watch(mapping, descriptor, path)
        if "{when}" == "after":
            faulthandler.enable()
        os.truncate(path, 0)
        print(data.sum(), flush=True)
        other = mmap.mmap(os.open("/proc/self/exe", os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        path.write_bytes(b"x")
        data, mapping, descriptor = mapped()
        os.truncate(path, 0)
        data.sum()
        """.replace("{when}", when)
    done = run(code, path)
    assert done.stdout == "0\n"
    assert done.returncode == -7
    assert "Fatal Python error: Bus error" in done.stderr


@linux
@pytest.mark.medium
def test_a_forked_process_has_the_handler(path: Path) -> None:
    done = run(
        """
        data, mapping, descriptor = mapped()
        watch = Watch(mapping, descriptor, path)
        child = os.fork()
        os.truncate(path, 0)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        print(data.sum(), flush=True)
        """,
        path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")


@linux
@pytest.mark.medium
@pytest.mark.parametrize(("kib", "expected"), [(0, "MemoryError"), (2048, "watched")])
def test_no_memory_for_the_handler(kib: int, expected: str, path: Path) -> None:
    """LLVM, which would end the process, is not needed."""
    watched(path)
    done = run(
        f"""
        import resource
        from pathlib import Path as File

        data, mapping, descriptor = mapped()
        used = int(File("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + {kib} << 10,) * 2)
        try:
            Watch(mapping, descriptor, path)
            print("watched")
        except MemoryError:
            print("MemoryError")
        """,
        path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")

"""Second process that compiles common kernels during a first run."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamacli.kernels import helper, jit
from llamacli.kernels.jit import Compiled


def triple(x):
    return 3 * x


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "helpers", [])
    return jit.cache_directory()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs that are started; they write one name."""
    commands: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], **options: object):
            commands.append(command)
            self.stdout = io.StringIO("triple\n")

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(helper, "usable_cores", lambda: SimpleNamespace(threads=2))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    counts = iter([2, 1, 3] * 2)
    monkeypatch.setattr(helper, "running_threads", lambda: next(counts))
    monkeypatch.setattr(helper, "load_average", lambda: 2.0)
    monkeypatch.setattr(helper, "jit_disabled", lambda: False)
    return commands


def test_program_is_started_where_no_kernel_is_cached(folder, starts) -> None:
    helper.start_helper()
    assert starts == [[sys.executable, "-m", "llamacli.kernels.helper"]]
    folder.mkdir(parents=True)
    (folder / "apply_steps-of-older-sources.kernel").touch()
    helper.start_helper()
    assert len(starts) == 2
    (folder / helper.common_kernels()[0].file_name).touch()
    helper.start_helper()
    assert len(starts) == 2


@pytest.mark.parametrize("reason", ["cores", "load", "python code"])
def test_program_is_not_started_where_it_is_of_no_use(reason, folder, starts, monkeypatch) -> None:
    if reason == "cores":
        monkeypatch.setattr(helper, "usable_cores", lambda: SimpleNamespace(threads=1))
    elif reason == "load":
        monkeypatch.setattr(helper, "running_threads", lambda: 2)
    else:
        monkeypatch.setattr(helper, "jit_disabled", lambda: True)
    helper.start_helper()
    assert starts == []


@pytest.mark.parametrize(("load", "n_starts"), [(0.5, 1), (1.5, 0), (None, 0)])
def test_load_average_counts_where_running_threads_are_unknown(load, n_starts, folder, starts, monkeypatch) -> None:
    monkeypatch.setattr(helper, "running_threads", lambda: None)
    monkeypatch.setattr(helper, "load_average", lambda: load)
    helper.start_helper()
    assert len(starts) == n_starts


def test_program_names_kernels_and_caches_them(folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(helper, "common_kernels", lambda: [Compiled(triple, "int64(int64)")])
    helper.main()
    assert capsys.readouterr().out == "triple\n"
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["triple"]


def test_program_ends_where_nothing_can_be_cached(folder, monkeypatch, capsys) -> None:
    kernels = [Compiled(triple, "int64(int64)", f"_{i}") for i in range(2)]
    monkeypatch.setattr(helper, "common_kernels", lambda: kernels)
    monkeypatch.setattr(jit._Entry, "save", lambda *_: None)
    helper.main()
    assert capsys.readouterr().out == "triple_0\n"


def test_wait_ends_with_the_next_kernel_and_with_the_program() -> None:
    reader, writer = os.pipe()
    ended = threading.Event()
    progress, waited = helper._Progress(os.fdopen(reader), ended.set), list[bool]()
    assert not progress.wait("one")
    os.write(writer, b"one\n")
    while not progress._begun:
        pass
    assert not progress.wait("two")
    thread = threading.Thread(target=lambda: waited.append(progress.wait("one")))
    thread.start()
    thread.join(0.05)
    assert waited == []
    os.write(writer, b"two\n")
    thread.join(10)
    assert waited == [True]
    os.close(writer)
    assert progress.wait("two")
    assert not progress.wait("three")
    assert ended.wait(10)


def test_kernel_of_another_process_is_loaded(folder, monkeypatch) -> None:
    compiled = list[str]()
    monkeypatch.setattr(jit, "listeners", [compiled.append])
    other = Compiled(triple, "int64(int64)")

    def wait(name: str) -> bool:
        monkeypatch.setattr(jit, "helpers", [])
        return other._make() != 0  # without the lock that the suite takes for `compile`

    monkeypatch.setattr(jit, "helpers", [wait])
    assert Compiled(triple, "int64(int64)").call(5) == 15
    assert compiled == ["triple"]


def test_program_that_is_late_is_not_waited_for(monkeypatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(helper, "_PATIENCE_S", 0.01)
    progress = helper._Progress(os.fdopen(reader), lambda: None)
    os.write(writer, b"one\n")
    while not progress._begun:
        pass
    assert not progress.wait("one")
    os.close(writer)

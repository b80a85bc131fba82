"""LLVM's answers about this CPU, kept in a file."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from llamacli.kernels import cpu, elf
from llamacli.kernels.elf import UnsupportedCodeError

ANSWER = ("x86_64-unknown-linux-gnu", "znver9", "+avx2,-sse4a")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """List of the questions to LLVM; all files are the test's."""
    questions: list[str] = []
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "_identity", lambda: "one")
    monkeypatch.setattr(cpu, "_ask_llvm", lambda: questions.append("") or ANSWER)
    yield questions
    cpu.host.cache_clear()


def host() -> tuple[str, str, str]:
    """The answer in another process."""
    cpu.host.cache_clear()
    return cpu.host()


def test_the_answer_is_that_of_llvm() -> None:
    binding_says = binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    assert cpu.host() == host() == binding_says


def test_llvm_is_asked_once(asked: list[str]) -> None:
    assert [host(), host(), host()] == [ANSWER] * 3
    assert len(asked) == 1


def test_another_cpu_is_asked_about(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    host()
    monkeypatch.setattr(cpu, "_identity", lambda: "other")
    assert [host(), host()] == [ANSWER] * 2
    assert len(asked) == 2


def refused() -> str:
    raise UnsupportedCodeError("memory that cannot be protected")


@pytest.mark.parametrize(("name", "value"), [("_identity", refused), ("is_supported", lambda: False)])
def test_nothing_is_kept_of_a_cpu_that_cannot_be_asked(
    name: str, value: Callable[[], Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, name, value)
    assert [host(), host()] == [ANSWER] * 2
    assert len(asked) == 2


@pytest.mark.skipif(not elf.is_supported(), reason="CPUID is an instruction of x86")
def test_identity_is_that_of_all_cores() -> None:
    """And of all times; it has the flags that Linux shows."""
    cores = os.sched_getaffinity(0)
    found = []
    try:
        for core in [*cores][:4]:
            os.sched_setaffinity(0, {core})
            found += [cpu._identity(), cpu._identity()]
    finally:
        os.sched_setaffinity(0, cores)
    assert len(set(found)) == 1
    vendor, features = json.loads(found[0].rpartition(" ")[0])[0], json.loads(found[0].rpartition(" ")[0])[2]
    text = Path("/proc/cpuinfo").read_text()
    assert struct.pack("<III", vendor[1], vendor[3], vendor[2]).decode() in text
    assert bool(features[1] & 1 << 5) == (" avx2 " in text)


def test_another_llvm_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    host()
    monkeypatch.setattr(cpu, "__version__", "9.9")
    host()
    assert len(asked) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b'["", "", ""]', b"[1, 2, 3, 4]", b"null"])
def test_a_damaged_file_is_written_anew(damage: bytes, asked: list[str], tmp_path: Path) -> None:
    host()
    file = tmp_path / "cache" / "cpu.json"
    file.write_bytes(damage)
    assert [host(), host()] == [ANSWER] * 2
    assert len(asked) == 2
    assert tuple(json.loads(file.read_bytes())[1:]) == ANSWER


def test_a_file_that_others_can_write_is_not_read(asked: list[str], tmp_path: Path) -> None:
    host()
    (tmp_path / "cache" / "cpu.json").chmod(0o666)
    host()
    assert len(asked) == 2


def test_a_cache_that_cannot_be_written_is_no_error(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert [host(), host()] == [ANSWER] * 2
    assert len(asked) == 2

"""LLVM's answers about this CPU, kept in a file."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from llvmlite import binding

from llamacli.kernels import cpu

CPUINFO = "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 2596.094\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: x\n"
ANSWER = ("x86_64-unknown-linux-gnu", "znver9", "+avx2,-sse4a")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """List of the questions to LLVM; all files are the test's."""
    questions: list[str] = []
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "_ask_llvm", lambda: questions.append("") or ANSWER)
    (tmp_path / "cpuinfo").write_text(CPUINFO)
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


@pytest.mark.parametrize(
    ("old", "new", "n_asked"),
    [("avx2", "avx2 amx_tile", 2), ("A", "B", 2), ("2596", "3000", 1), (": x", ": y", 1), ("flags", "Features", 3)],
)
def test_another_cpu_is_asked_about(old: str, new: str, n_asked: int, asked: list[str]) -> None:
    """Not a changed frequency, nor another core; without flags, nothing is kept."""
    host()
    cpu._CPUINFO.write_text(CPUINFO.replace(old, new))
    assert [host(), host()] == [ANSWER] * 2
    assert len(asked) == n_asked


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

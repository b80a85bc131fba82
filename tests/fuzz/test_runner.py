"""Fuzzer: every kind of fault is found, and its case is kept."""

from pathlib import Path

import pytest

from fuzz.child import case_of
from fuzz.runner import Result, fuzz

CASES = 110
"""Cases of a test: all hundred different ones, and more after a fault."""


def run(name: str, folder: Path, cases: int = CASES) -> Result:
    return fuzz(f"fuzz.broken_targets:{name}", cases=cases, seed=1, findings=folder / "findings")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sound", "files"])
def test_sound_target_has_no_findings(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path, 100)
    assert (result.findings, result.n_slow, result.n_cases) == (set(), 0, 100)
    assert result.n_refused == 0 or name == "sound"
    assert list(tmp_path.rglob("*.txt")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("raises", "KeyError at broken_targets.py"),
        ("plugin", "PluginError at broken_targets.py:"),
        ("signal", "exit code -11: Fatal Python error: Segmentation fault"),
        ("hangs", "more than 0.2 s"),
        ("loops", "more than 0.2 s"),
        ("memory", "MemoryError at broken_targets.py"),
    ],
)
def test_fault_is_found_with_its_case(name: str, summary: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    (finding,) = result.findings
    assert finding.read_text().startswith(summary)
    assert case_of(finding) == 77
    assert result.n_cases >= CASES - 10


@pytest.mark.slow
def test_growing_memory_is_found(tmp_path: Path) -> None:
    result = run("grows", tmp_path, 600)
    assert result.growth > 64 << 20
    (finding,) = result.findings
    assert finding.read_text().startswith("memory grew")


@pytest.mark.slow
def test_child_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        run("cannot start", tmp_path)

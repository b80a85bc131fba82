"""Tutorials, executed from top to bottom, with their output compared.

Programs of a tutorial are joined into one. `...` in an output matches anything.
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("[0-9]*.md"))

MARK = "-- end of block --"


def blocks(tutorial: Path) -> list[tuple[str, str]]:
    """Language and content of every code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", tutorial.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the models of the tutorials."""
    shutil.copytree(FOLDER / "shapes", tmp_path / "shapes")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": scripts}, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(expected: str, actual: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, actual, options), f"expected {expected!r}, got {actual!r}"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_programs(tutorial: Path, folder: Path) -> None:
    found = [block for block in blocks(tutorial) if block[0] in ("python", "output")]
    programs = [text for language, text in found if language == "python"]
    printed = run(folder, sys.executable, "-c", f"\nprint({MARK!r})\n".join(programs)).split(f"{MARK}\n")
    number = -1
    for language, text in found:
        if language == "python":
            number += 1
        else:
            check(text, printed[number])


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_commands(tutorial: Path, folder: Path) -> None:
    for language, text in blocks(tutorial):
        if language == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                actual = run(folder, "bash", "-o", "pipefail", "-c", command)
                if expected:
                    check(expected, actual)


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) >= 4
    index = (FOLDER / "README.md").read_text()
    assert all(f"({path.name})" in index for path in TUTORIALS)


def test_wrong_output_fails() -> None:
    with pytest.raises(AssertionError, match="expected"):
        check("1 ... 3\n", "1 2 4\n")

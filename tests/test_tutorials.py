"""Tutorials, executed from top to bottom, with their output compared.

Programs of a page share one interpreter. `...` in an output matches anything. Models of
the hub are small stand-ins. A command that ends in `&` runs until the page ends; port 8012 is a free one.
"""

import contextlib
import doctest
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from page_models import write_pages_folder

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
TUTORIALS = [*sorted(FOLDER.glob("[0-9]*.md")), FOLDER.parent / "first-model.md"]

MARK = "-- end of block --"
INTERPRETER = f"""
import json, sys
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    exec(compile(json.loads(line), "<page>", "exec"), names)
    print({MARK!r}, flush=True)
"""


def blocks(tutorial: Path) -> list[tuple[str, str]]:
    """Language and content of every code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", tutorial.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the models of the tutorials."""
    write_pages_folder(tmp_path)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": scripts, "XDG_CONFIG_HOME": str(folder / "config")}


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        arguments, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def started(folder: Path, command: str) -> Iterator[None]:
    """Server in the background, from when it has printed its address."""
    with (folder / "server.txt").open("wb") as output:
        server = subprocess.Popen(
            shlex.split(command), cwd=folder, env=environment(folder), stdout=output, stderr=output,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while "http://" not in (said := (folder / "server.txt").read_text()):
                assert server.poll() is None, said
                time.sleep(0.05)
            yield
        finally:
            server.terminate()
            server.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def check(expected: str, actual: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, actual, options), f"expected {expected!r}, got {actual!r}"


class Page:
    """Shell and interpreter of a page, in a folder of its own."""

    def __init__(self, folder: Path, closing: contextlib.ExitStack):
        self.folder, self._closing, self.port = folder, closing, str(free_port())
        errors = closing.enter_context((folder / "python.txt").open("wb"))
        self._interpreter = closing.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", INTERPRETER], cwd=folder, env=environment(folder), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )
        )  # fmt: skip
        assert self._interpreter.stdin is not None
        closing.callback(self._interpreter.stdin.close)

    def python(self, program: str) -> str:
        """Output of a program, which knows the names of earlier ones."""
        stdin, stdout = self._interpreter.stdin, self._interpreter.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps(program)}\n")
        stdin.flush()
        lines: list[str] = []
        while not lines or not lines[-1].endswith(f"{MARK}\n"):
            lines.append(stdout.readline())
            assert lines[-1], (self.folder / "python.txt").read_text()
        return "".join(lines).removesuffix(f"{MARK}\n")

    def console(self, text: str) -> None:
        """Run commands and compare what they print."""
        for command, expected in re.findall(
            r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text.replace("8012", self.port), re.MULTILINE
        ):
            if command.endswith(" &"):
                self._closing.enter_context(started(self.folder, command.removesuffix(" &")))
            else:
                actual = run(self.folder, "bash", "-o", "pipefail", "-c", command)
                if expected:
                    check(expected, actual)


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_page(tutorial: Path, folder: Path) -> None:
    printed = ""
    with contextlib.ExitStack() as closing:
        page = Page(folder, closing)
        for language, text in blocks(tutorial):
            if language == "python":
                printed = page.python(text)
            elif language == "output":
                check(text, printed)
            elif language == "console":
                page.console(text)


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) >= 4
    index = (FOLDER / "README.md").read_text()
    assert all(f"{path.name})" in index for path in TUTORIALS)


def test_wrong_output_fails() -> None:
    with pytest.raises(AssertionError, match="expected"):
        check("1 ... 3\n", "1 2 4\n")

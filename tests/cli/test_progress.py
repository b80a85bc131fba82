"""Progress bars on a terminal, and no output in a pipe."""

import os
import pty
import re
from pathlib import Path

import pytest

import tiny_llama
from llamacli.cli import progress
from llamacli.cli.output import human_bytes, note, status

TIMEOUT_S = 120


def what_a_terminal_shows(user: int) -> str:
    """All output of a terminal until the program closes it."""
    data = b""
    while True:
        try:
            more = os.read(user, 65536)
        except OSError:  # the other end is closed
            return data.decode()
        if not more:
            return data.decode()
        data += more


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Make stderr of this process look like a terminal.

    Capsys has the output.
    """
    monkeypatch.setattr(progress, "has_status", lambda: True)
    monkeypatch.setattr(progress, "_DELAY_S", 0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0)
    monkeypatch.setenv("COLUMNS", "80")


def test_progress_bar(terminal, capsys) -> None:
    with progress.bar("loading x", human_bytes) as draw:
        draw(0, 2048)
        draw(512, 2048)
        draw(2048, 2048)
    lines = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert lines == [
        "loading x [........................]   0 %  0 B of 2.00 KiB",
        "loading x [######..................]  25 %  512 B of 2.00 KiB",
        "",
    ]


def test_note_removes_the_bar(terminal, capsys) -> None:
    with progress.bar("b") as draw:
        draw(1, 2)
        note("a warning")
        draw(1, 2)
        draw(2, 2)
    assert re.sub(r"b \[.*?\] ", "", capsys.readouterr().err) == (
        "\r\x1b[K 50 %  1 of 2\r\x1b[Ka warning\n\r\x1b[K 50 %  1 of 2\r\x1b[K"
    )


def test_status_is_cut_to_terminal_width(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    status("x" * 50)
    status("")
    assert capsys.readouterr().err == f"\r\x1b[K{'x' * 19}\r\x1b[K"


def test_bar_with_total_of_zero(terminal) -> None:
    with progress.bar("b") as draw:
        draw(0, 0)


def test_exception_removes_the_bar(terminal, capsys) -> None:
    def fail() -> None:
        with progress.bar("b") as draw:
            draw(1, 2)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert capsys.readouterr().err.endswith("\r\x1b[K")


def test_no_bar_for_short_work(terminal, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_S", 60)
    with progress.bar("b") as draw:
        draw(1, 2)
    assert capsys.readouterr().err == ""


@pytest.fixture
def compiling(start, tmp_path: Path):
    """Start a run that has to compile its kernels."""
    model = tiny_llama.write_llama(tmp_path / "model.gguf", tokenizer="spm")

    def begin(**options):
        env = {"NUMBA_DISABLE_JIT": "0", "LLAMACLI_CACHE": str(tmp_path / "cache")}
        return start("run", model, "-p", "once", "-n", "2", "--temp", "0", env=env, **options)

    return begin


def test_compiled_kernels_are_shown_on_a_terminal(compiling) -> None:
    user, program = pty.openpty()
    process = compiling(stderr=program)
    os.close(program)
    shown = what_a_terminal_shows(user)
    os.close(user)
    assert process.wait(TIMEOUT_S) == 0
    assert "compiling kernel 1: " in shown
    assert ": linear_F32" in shown
    assert shown.count("this happens once") == 1
    assert shown.endswith("\r\x1b[K")


def test_compilation_is_one_line_in_a_pipe(compiling) -> None:
    process = compiling()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert err.decode().splitlines() == [
        "llamacli: warning: compiling kernels for this CPU; this happens once and takes some seconds"
    ]


@pytest.fixture
def long_prompt(start, tmp_path: Path):
    """Start a run that reads its prompt slowly, with NumPy."""
    model = tiny_llama.write_llama(tmp_path / "model.gguf", tokenizer="spm", context_length=8192)
    (text := tmp_path / "text.txt").write_text("once upon a time " * 800)

    def begin(*arguments: str, **options):
        return start("run", model, "-f", text, "-n", "1", "--temp", "0", "-t", "1", *arguments, **options)

    return begin


def test_long_prompt_has_a_bar_on_a_terminal(long_prompt) -> None:
    user, program = pty.openpty()
    process = long_prompt(stdout=program, stderr=program)
    os.close(program)
    shown = what_a_terminal_shows(user)
    os.close(user)
    assert process.wait(TIMEOUT_S) == 0
    assert re.search(r"\r\x1b\[Kreading the prompt \[#+\.*\]  ?\d+ %  \d+ of \d{4}\r\x1b\[K", shown)
    assert shown[shown.rindex("\r\x1b[K") :].startswith("\r\x1b[Konce upon a time once"), "then comes the text"


def test_long_prompt_has_no_bar_in_a_pipe(long_prompt) -> None:
    process = long_prompt()
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert out.startswith(b"once upon a time once")
    assert err == b""

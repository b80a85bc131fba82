"""Progress bars on a terminal, and no output in a pipe."""

import os
import pty
import re
import threading
import types
from pathlib import Path

import pytest

import tiny_llama
from llamacli import Stats
from llamacli.cli import progress
from llamacli.cli.output import human_bytes, note, status
from llamacli.engine.base import Timings

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


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Make stderr of this process look like a terminal.

    Capsys has the output.
    """
    monkeypatch.setattr(progress, "has_status", lambda: True)
    monkeypatch.setattr(progress, "_DELAY_S", 0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "120")


def test_line_without_reports_has_the_time(clock: Clock) -> None:
    task = progress.Task("thinking", clock=clock)
    assert task.line() == "| thinking, 0 s"
    clock.now += 65
    assert task.line() == "/ thinking, 1 min 5 s"


def test_line_has_bar_and_time_left(clock: Clock) -> None:
    task = progress.Task("loading x", human_bytes, clock=clock)
    task.report(0, 2048)
    assert task.line() == "| loading x [................]   0 %  ...  0 B of 2.00 KiB"
    clock.now += 2
    task.report(512, 2048)
    assert task.line() == "/ loading x [####............]  25 %  6 s left  512 B of 2.00 KiB"
    task.report(2048, 2048)
    assert task.line() == "- loading x, 2 s"


def test_progress_between_reports_is_interpolated(clock: Clock) -> None:
    task = progress.Task("reading", unit=" tokens", clock=clock)
    task.report(0, 2000)
    clock.now += 5
    task.report(500, 2000)
    shares = []
    for _ in range(8):
        clock.now += 1
        shares.append(re.search(r"(\d+) %  (\d+) s left  (\d+) of 2000 tokens", task.line()).groups())
    assert shares[:3] == [("30", "14", "600"), ("35", "13", "700"), ("40", "12", "800")]
    assert shares[-1] == ("48", "10", "975"), "but not beyond the next report"


def test_known_rate_gives_the_time_left_at_once(clock: Clock) -> None:
    task = progress.Task("reading", rate=100.0, clock=clock)
    task.report(0, 1000)
    clock.now += 3
    assert "30 %  7 s left" in task.line()


def test_progress_within_a_step_is_that_of_the_task(clock: Clock) -> None:
    share = [0.0]
    task = progress.Task("reading", unit=" tokens", step=512, share=lambda: share[0], clock=clock)
    task.report(0, 1000)
    clock.now += 2
    share[0] = 0.5
    assert task.line() == "| reading [####............]  25 %  6 s left  256 of 1000 tokens"
    task.report(512, 1000)
    assert "75 %" in task.line()


def test_share_of_a_task_without_reports(clock: Clock) -> None:
    task = progress.Task("reading", share=lambda: 0.25, clock=clock)
    clock.now += 2
    assert task.line() == "| reading [####............]  25 %  6 s left"


def test_detail_is_shown_until_the_next_report(clock: Clock) -> None:
    task = progress.Task("loading", clock=clock)
    task.detail = "compiling kernel 1: add"
    assert task.line() == "| compiling kernel 1: add"
    task.report(0, 0)
    assert task.line() == "/ loading, 0 s"


def test_bar_moves_by_itself_and_is_removed(terminal, capsys) -> None:
    shown = ""
    with progress.bar("b") as draw:
        draw(1, 2)
        while len(set(re.findall(r"([-|/\\]) b ", shown))) < 3:
            shown += capsys.readouterr().err
    assert capsys.readouterr().err.endswith("\r\x1b[K")


def test_note_removes_the_bar(terminal, capsys, monkeypatch) -> None:
    with progress.bar("b"):
        shown = ""
        while "b, " not in shown:
            shown += capsys.readouterr().err
        for _ in range(50):
            note("a warning")
    *lines, last = (shown + capsys.readouterr().err).split("\n")
    assert len(lines) == 50
    assert all(line == "a warning" or line.endswith("\r\x1b[Ka warning") for line in lines)
    assert "warning" not in last


def test_waiting_ends_with_the_first_item(terminal, capsys) -> None:
    with progress.shown(progress.Task("reading")) as end:
        wait, seen = progress.Waiting(progress.Task("reading"), end), []
        for item in wait.watch([1, 2]):
            seen.append(item)
            capsys.readouterr()
            assert "llamacli-status" not in [thread.name for thread in threading.enumerate()]
    assert seen == [1, 2]


def test_quiet_waiting_counts_the_items(clock: Clock) -> None:
    task, lines, ended = progress.Task("reading", clock=clock), [], []
    for _ in progress.Waiting(task, lambda: ended.append(True)).watch("abc", quiet=True):
        lines.append(task.line())
        assert not ended
    assert lines == ["| writing, 1 tokens, 0 s", "/ writing, 2 tokens, 0 s", "- writing, 3 tokens, 0 s"]
    assert ended


def test_waiting_restores_the_progress_of_a_session(terminal) -> None:
    program = types.SimpleNamespace(timings=Timings())
    session = types.SimpleNamespace(progress=None, stats=Stats(), model=types.SimpleNamespace(program=program))
    with progress.waiting(session):
        session.progress(1, 2)
    assert session.progress is None


def test_status_is_cut_to_terminal_width(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    status("x" * 50)
    status("")
    assert capsys.readouterr().err == f"\r\x1b[K{'x' * 19}\r\x1b[K"


def test_exception_removes_the_bar(terminal, capsys) -> None:
    def fail() -> None:
        with progress.bar("b") as draw:
            draw(1, 2)
            while "b [" not in capsys.readouterr().err:
                pass
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


@pytest.mark.slow
def test_compiled_kernels_are_shown_on_a_terminal(compiling) -> None:
    user, program = pty.openpty()
    process = compiling(stderr=program)
    os.close(program)
    shown = what_a_terminal_shows(user)
    os.close(user)
    assert process.wait(TIMEOUT_S) == 0
    assert "compiling kernel 1: " in shown
    assert ": linear_F32" in shown
    assert shown.count("compiling kernels for this CPU") == 1
    assert shown.endswith("\r\x1b[K")


@pytest.mark.slow
def test_compilation_is_one_line_in_a_pipe(compiling) -> None:
    process = compiling()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert err.decode().splitlines() == [
        "llamacli: warning: compiling kernels for this CPU, for some seconds; later runs load them from the cache"
    ]


@pytest.fixture
def long_prompt(start, tmp_path: Path):
    """Start a run that reads its prompt slowly, with NumPy."""
    model = tiny_llama.write_llama(tmp_path / "model.gguf", tokenizer="spm", context_length=8192)
    (text := tmp_path / "text.txt").write_text("once upon a time " * 1600)

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
    moves = re.findall(r"\r\x1b\[K. reading the prompt \[#*\.*\] +\d+ %  \d+ s left  \d+ of \d{4} tokens", shown)
    assert len(set(moves)) > 2
    assert shown[shown.rindex("\r\x1b[K") :].startswith("\r\x1b[Konce upon a time once"), "then comes the text"


def test_long_prompt_has_no_bar_in_a_pipe(long_prompt) -> None:
    process = long_prompt()
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert out.startswith(b"once upon a time once")
    assert err == b""


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        (("inspect", "MODEL"), "reading the file"),
        (("tokenize", "MODEL", "once"), "reading the vocabulary"),
        (("trace", "MODEL"), "recording the forward pass"),
        (("trace", "MODEL", "--values"), "running the ops"),
        (("plugins",), "loading plugins"),
        (("plugins", "new", "mine", "--like", "dense", "--folder", "FOLDER"), "describing the model"),
    ],
)
def test_commands_show_what_they_wait_for(
    arguments: tuple[str, ...], label: str, terminal, invoke, model: Path, tmp_path: Path
) -> None:
    paths = {"MODEL": model, "FOLDER": tmp_path / "mine"}
    result = invoke(*(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code == 0
    assert f"| {label}, 0 s" in result.stderr
    assert result.stderr.endswith("\r\x1b[K")
    assert "\x1b" not in result.stdout

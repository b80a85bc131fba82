import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest

from llamacli.cli.wrap import WordWrap, flowed, word_wrap

MOVED = re.compile(r"(.*)\x1b\[(\d+)D\x1b\[K\n", re.DOTALL)


def screen(pieces: list[str], columns: int) -> str:
    """Text on a terminal that is this wide, after the pieces."""
    wrap = WordWrap(lambda: columns)
    return shown_by("".join(map(wrap.feed, pieces)))


def shown_by(output: str) -> str:
    """Text that a terminal shows."""
    shown = ""
    for part in re.split(r"(?<=\x1b\[K\n)", output):
        shown += part
        while found := MOVED.fullmatch(shown):
            shown = found[1][: -int(found[2])] + "\n"
    return shown


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("once upon a time", 11, ["once upon ", "a time"]),
        ("once upon a time", 80, ["once upon a time"]),
        ("one\n\ntwo three", 8, ["one", "", "two ", "three"]),
        ("a supercalifragilistic b", 10, ["a ", "supercali", "fragilist", "ic b"]),
        ("12345678 9", 9, ["12345678", "9"]),
        ("日本語日本語", 9, ["日本語日", "本語"]),
        ("a\tb c", 10, ["a\tb", "c"]),
    ],
)
def test_words_are_not_broken_in_any_split(text: str, columns: int, lines: list[str]) -> None:
    assert screen([text], columns).split("\n") == lines
    assert screen(list(text), columns).split("\n") == lines


def test_text_is_unchanged_within_the_line() -> None:
    wrap = WordWrap(lambda: 80)
    assert wrap.feed("print('a  b')\n    x") == "print('a  b')\n    x"


def test_terminal_without_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert word_wrap()("x" * 200) == "x" * 200
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert word_wrap()("x" * 200).count("\n") == 2


def test_one_completion_at_a_terminal(start, model: Path) -> None:
    user, tty = pty.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 25, 0, 0))
    prompt = " ".join(["elephants"] * 5)
    process = start(
        "run", model, "-n", "0", "-p", prompt, stdin=tty, stdout=tty, stderr=tty, env={"TERM": "xterm", "COLUMNS": ""}
    )
    os.close(tty)
    output = b""
    while True:
        try:
            output += os.read(user, 65536)
        except OSError:  # the program has ended
            break
    os.close(user)
    assert process.wait() == 0
    text = re.sub(r"\r\x1b\[K[^\r]*(?=\r\x1b\[K)|\r\x1b\[K", "", output.decode()).replace("\r\n", "\n")
    assert shown_by(text).split("\n") == ["elephants elephants "] * 2 + ["elephants", ""]


def test_cells_are_not_broken() -> None:
    assert flowed(["1 ' a'", "2 ' b'", "3 ' c'"], 14) == ["1 ' a'  2 ' b'", "3 ' c'"]
    assert flowed(["日本", "日本"], 9) == ["日本", "日本"]
    assert flowed(["longer than that"], 4) == ["longer than that"]
    assert flowed([], 4) == []

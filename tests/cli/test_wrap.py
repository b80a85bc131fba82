import re

import pytest

from llamacli.cli.wrap import WordWrap, word_wrap

MOVED = re.compile(r"(.*)\x1b\[(\d+)D\x1b\[K\n", re.DOTALL)


def screen(pieces: list[str], columns: int) -> str:
    """Text on a terminal that is this wide, after the pieces."""
    wrap, shown = WordWrap(lambda: columns), ""
    for piece in pieces:
        for part in re.split(r"(?<=\x1b\[K\n)", wrap.feed(piece)):
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

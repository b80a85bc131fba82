import itertools

import pytest

from llamacli.sampling import StopStrings
from llamacli.sampling.stop_strings import IndentLimit


def matched(pieces: list[str], *stops: str) -> tuple[str, str]:
    """Text before the stop string, and the stop string."""
    stop, text = StopStrings(stops), ""
    for piece in pieces:
        text += stop.feed(piece)
        if stop.found:
            return text, stop.found
    return text + stop.flush(), ""


@pytest.mark.parametrize(
    ("text", "stops", "before", "found"),
    [
        ("one\ntwo", ["\n"], "one", "\n"),
        ("one two", ["\n"], "one two", ""),
        ("abcabd", ["abd"], "abc", "abd"),
        ("aaab", ["aab"], "a", "aab"),
        ("xUser", ["User:"], "xUser", ""),
        ("xUser:", ["User:", "er:"], "x", "User:"),
        ("abcd", ["abcd", "c"], "ab", "c"),
        ("ab", [], "ab", ""),
    ],
)
def test_text_ends_before_a_stop_string_in_all_splits(text: str, stops: list[str], before: str, found: str) -> None:
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        assert matched(pieces, *stops) == (before, found)


def test_nothing_is_held_back_that_cannot_end_the_text() -> None:
    assert StopStrings([]).feed("ab") == "ab"
    assert IndentLimit(2).feed("a\n  ") == "a\n  "


def test_only_possible_beginnings_are_held_back() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert stop.feed("Hello.\n") == "Hello."
    assert stop.feed("Bye.") == "\nBye."
    assert stop.feed("\n\nUse") == ""
    assert stop.feed("d") == "\n\nUsed"
    assert not stop.found


@pytest.mark.parametrize(
    ("text", "least", "expected"),
    [
        ("a\n  b\nc", 2, ("a\n  b\n", True)),
        ("a\n  b\n c", 2, ("a\n  b\n ", True)),
        ("a\n  b\n\tc", 1, ("a\n  b\n\tc", False)),
        ("a\n\n\n  b", 2, ("a\n\n\n  b", False)),
        ("a\n \n  b\n", 2, ("a\n \n  b\n", False)),
        ("a\nb", 0, ("a\nb", False)),
        ("\nb", 1, ("\n", True)),
        ("a", 5, ("a", False)),
    ],
)
def test_indentation_ends_a_text(text: str, least: int, expected: tuple[str, bool]) -> None:
    for size in (1, 2, 3, len(text)):
        limit, out = IndentLimit(least), ""
        for i in range(0, len(text), size):
            out += limit.feed(text[i : i + size])
            if limit.found:
                break
        assert (out + limit.flush(), limit.found) == expected

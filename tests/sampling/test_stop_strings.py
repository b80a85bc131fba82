import itertools

import pytest

from llamacli.sampling import StopStrings


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


def test_only_possible_beginnings_are_held_back() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert stop.feed("Hello.\n") == "Hello."
    assert stop.feed("Bye.") == "\nBye."
    assert stop.feed("\n\nUse") == ""
    assert stop.feed("d") == "\n\nUsed"
    assert not stop.found

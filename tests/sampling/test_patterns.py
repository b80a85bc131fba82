"""Shortest texts of regular expressions."""

import pytest

from llamacli.sampling.patterns import shortest_text


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0), ("a", 1), ("ab|c", 1), ("(|a)b", 1), ("(ab|c){3}", 3), ("(?:ab)+", 2), ("(?P<n>ab){2,}", 4),
        ("a{0,5}b", 1), ("a{2}{3}b*", 6), ("[a-z\\]]{7}x?", 7), ("[^]a]{2}", 2), ("[[:alpha:]_]{3}", 3),
        ("^\\d{3}-\\d{4}$", 8), ("\\x{41}{2}", 2), ("\\p{Lu}{4}\\b", 4), ("(?i)a{3}", 3), ("a{b}", 4), ("\\({5}", 5),
        ("[" * 9, 1), ("[a{5}", 1),
        ("((a{1000}){1000}){1000}", 10**9), ("(x|(a{1000}){1000})", 1),
    ],
)  # fmt: skip
def test_lengths(pattern: str, length: int) -> None:
    assert shortest_text(pattern) == length


def test_lengths_stay_small_numbers() -> None:
    nested = "(" * 2000 + "a" + "){1000}" * 2000
    for unfinished in ("[", "(", "\\x{", "{1", "(?a", "a{2,", "\\p{"):
        shortest_text(unfinished * 5_000)
    assert 10**18 < shortest_text(nested) < 10**20

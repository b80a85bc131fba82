"""Shortest texts of regular expressions, counted without expanding repetitions."""

from __future__ import annotations

import re

_SATURATED = 1 << 62
# Without backtracking: the time is linear in the pattern's length.
_ITEM = re.compile(
    r"(?P<flags>\(\?[a-zA-Z-]+\))|(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<repeat>\{(?P<low>\d+)(?:,\d*)?\}|[*?+])"
    r"|(?P<nothing>\\[bBAzG<>]|[\^$])"
    r"|(?P<set>\[\^?\]?(?:\\.|\[:\w{1,10}:\]|[^\]\\])*+(?:\]|\Z))"
    r"|(?P<character>\\[xuUpP]\{[^}]{0,40}\}|\\x..|\\u....|\\.|.)",
    re.DOTALL,
)


def shortest_text(pattern: str) -> int:
    """Characters of the shortest text that a regular expression matches.

    At least that: each class has one character. Patterns that are not valid have some number; the engine refuses them.
    """
    outer: list[tuple[int | None, int]] = []
    best: int | None = None
    before = last = 0
    for item in _ITEM.finditer(pattern):
        if item["open"]:
            outer.append((best, before + last))
            best, before, last = None, 0, 0
        elif item["close"]:
            inner = before + last if best is None else min(best, before + last)
            best, before = outer.pop() if outer else (None, 0)
            last = inner
        elif item["or"]:
            length = before + last
            best, before, last = length if best is None else min(best, length), 0, 0
        elif item["repeat"]:
            times = 1 if item["repeat"] == "+" else int((item["low"] or "0")[:20])
            last = min(last * times, _SATURATED)
        elif not item["flags"]:
            before, last = min(before + last, _SATURATED), 0 if item["nothing"] else 1
    return before + last if best is None else min(best, before + last)

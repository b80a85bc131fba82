"""Stop strings and limits of indentation, matched over streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Matcher of stop strings over streamed text.

    The text ends before the stop string that is complete first; of several that end at one character, before the
    longest. So the result does not depend on how the text is split into pieces.

    - `found`: the stop string that has ended the text, "" until then; nothing may be fed afterwards.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def feed(self, piece: str) -> str:
        """Add a piece; returns the text that is before any stop string."""
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        n = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[n:]
        return text[:n]

    def flush(self) -> str:
        """Return the text held back, at the text's end."""
        held, self._held = self._held, ""
        return held


class IndentLimit:
    """End of a text by the indentation of its lines.

    A text ends at the first line, its own first excepted, that is indented less than `least` characters.
    White space that may begin such a line is held back. The text ends before the first other character of the line, as
    llama-server's with `n_indent`.

    - `found`: true once such a line has come; nothing may be fed afterwards.
    """

    def __init__(self, least: int):
        self._least, self._held, self.found = least, "", False

    def feed(self, piece: str) -> str:
        """Add a piece; returns the text that is certain."""
        if not self._least:
            return piece
        text, start = self._held + piece, 0
        while (newline := text.find("\n", start)) >= 0:
            line = text[newline + 1 :]
            indent = len(line) - len(line.lstrip(" \t"))
            start = newline + 1
            if indent == len(line) and indent < self._least:
                self._held = text[newline:]
                return text[:newline]
            if indent < self._least and line[indent] != "\n":
                self._held, self.found = "", True
                return text[: start + indent]
        self._held = ""
        return text

    def flush(self) -> str:
        """Return the white space held back, at the text's end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""Stop strings, matched over streamed text."""

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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

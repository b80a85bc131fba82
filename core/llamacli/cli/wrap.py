"""Word wrap of text that is streamed to a terminal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable

_TAB = 8


class WordWrap:
    """Word wrap of streamed text.

    A word that reaches the edge is erased and written again in the next line, so that no text has to be held back.
    `columns` returns the width of the terminal.
    """

    def __init__(self, columns: Callable[[], int]):
        self._columns = columns
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """Text to write for the next piece, with control sequences."""
        edge = self._columns() - 1  # at the very edge terminals differ in where the cursor is
        return "".join(self._place(character, edge) for character in text)

    def _place(self, character: str, edge: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        width = _n_cells(character)
        if character.isspace():
            self._word = ""
            self._column += _TAB - self._column % _TAB if character == "\t" else width
            if self._column <= edge:
                return character
            self._column = 0
            return "\n"
        moved, n_cells = "", _n_cells(self._word)
        if self._column + width > edge:
            moved = "\n"
            if n_cells == self._column:  # the word is as long as the line
                self._column, self._word = 0, ""
            else:
                if n_cells:
                    moved = f"\x1b[{n_cells}D\x1b[K\n{self._word}"
                self._column = n_cells
        self._column += width
        self._word = "" if width == 2 else self._word + character  # lines may break after each wide character
        return moved + character


def word_wrap() -> Callable[[str], str]:
    """Word wrap for `write` at the terminal's width; none on dumb terminals."""
    if os.environ.get("TERM") == "dumb":
        return str
    return WordWrap(lambda: shutil.get_terminal_size().columns).feed


def flowed(cells: Iterable[str], width: int) -> list[str]:
    """Lines of cells with two spaces between them, broken between cells only."""
    lines: list[str] = []
    for cell in cells:
        if lines and _n_cells(lines[-1]) + 2 + _n_cells(cell) <= width:
            lines[-1] += f"  {cell}"
        else:
            lines.append(cell)
    return lines


def _n_cells(text: str) -> int:
    from wcwidth import wcwidth

    return sum(max(0, wcwidth(character)) for character in text)

"""Text of tool calls as it comes.

Parsers are generators: they yield None where more text is needed, and go on when there is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from typing import Any, NoReturn, TypeVar

from llamacli.chat.rules import Rules

T = TypeVar("T")

Reading = Generator[str | None, None, T]
"""Parser that yields normal JSON as it comes, None where it needs more text."""
Awaiting = Generator[None, None, T]
"""Parser that yields None where it needs more text."""

CallReading = Generator[tuple[str, str | None] | None, None, None]
"""Parser of calls as they come: names with text of the arguments in JSON, and with None at the end of each call.

It yields None where it needs more text. Raises ValueError, IncompleteCallError at the end of the text.
"""

ID = "\ue001"
"""Place of a call's id in the texts of a notation: a character for private use."""

_ID_GRAMMAR = "/[a-zA-Z0-9_.:-]{1,64}/"
_SPACE, _ID = re.compile(r"\s*"), re.compile(r"[\w.:-]*")


class IncompleteCallError(ValueError):
    """Text that begins like a tool call and ends within it."""


class CallText:
    """Text of calls, read up to character `at`; `final` if all came."""

    def __init__(self, text: str = "", at: int = 0, *, final: bool = False):
        self.text, self.at, self.final = text, at, final

    @property
    def next(self) -> str:
        """Next character, "" at the end."""
        return self.text[self.at : self.at + 1]

    def more(self) -> Awaiting[None]:
        """Wait for more text. Raises IncompleteCallError if there is none."""
        if self.final:
            raise IncompleteCallError(f"{self.text[-80:]!r} is not the end of a tool call")
        yield None

    def space(self) -> Awaiting[None]:
        """Skip white space; raises IncompleteCallError without a character behind it."""
        while True:
            self.at = self.after_space(self.at)
            if self.at < len(self.text):
                return
            yield from self.more()

    def take(self, text: str) -> Awaiting[bool]:
        """Skip a text of a notation; returns whether it was there."""
        while (end := self.fits(text)) is None:
            yield from self.more()
        self.at = max(end, self.at)
        return end >= 0

    def fits(self, text: str, at: int | None = None) -> int | None:
        """Place after a text of a notation.

        -1 if it is not there, None if only more text can tell. White space before each of its words is optional.
        """
        at = self.at if at is None else at
        for n, word in enumerate(_words(text)):
            start = self.after_space(at)
            end = self._fits_word(word, start)
            if end is None:
                return -1 if self.final and not n and start == len(self.text) else None
            if end < 0:
                return -1
            at = end
        return at

    def _fits_word(self, word: str, at: int) -> int | None:
        fixed, numbered, rest = word.partition(ID)
        if not self.text.startswith(fixed, at):
            return None if fixed.startswith(self.text[at : at + len(fixed)]) else -1
        at += len(fixed)
        if not numbered:
            return at
        found = _ID.match(self.text, at)
        assert found is not None
        if found.end() == len(self.text) and not self.final:
            return None
        return self._fits_word(rest, found.end())

    def after_space(self, at: int) -> int:
        """Place after white space."""
        found = _SPACE.match(self.text, at)
        assert found is not None
        return found.end()

    def expect(self, character: str) -> Awaiting[None]:
        """Skip white space and a character. Raises ValueError for another one."""
        yield from self.space()
        if self.next != character:
            self.fail()
        self.at += 1

    def comes(self, texts: Sequence[str]) -> Awaiting[bool]:
        """Test for one of some texts, which are not skipped."""
        while texts:
            ends = [self.fits(text) for text in texts]
            if any(end is not None and end >= 0 for end in ends):
                return True
            if None not in ends or self.final:
                break
            yield None
        return False

    def followed(self, texts: Sequence[str]) -> Awaiting[None]:
        """Wait for one of some texts. Raises ValueError for another."""
        while True:
            ends = [self.fits(text) for text in texts if text.strip()]
            if any(end is not None and end >= 0 for end in ends):
                return
            if None not in ends and self.text[self.at :].strip():
                self.fail()
            yield from self.more()

    def fail(self) -> NoReturn:
        """Raise ValueError for the next text."""
        raise ValueError(f"{self.text[self.at : self.at + 80]!r} is not part of a tool call")


@functools.lru_cache(maxsize=512)
def _words(text: str) -> list[str]:
    """Words of a text, fences of code blocks apart."""
    return [word for word in re.split(r"\s+|(?<=\])(?=`)", text) if word]


def expression(rules: Rules, text: str) -> str:
    """Expression of a text of a notation, for grammars."""
    return f" {_ID_GRAMMAR} ".join(rules.marker(part) if part else "" for part in text.split(ID))


def at_once(reading: Generator[Any, None, T]) -> T:
    """Result of a parser whose text is final."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            result: T = end.value
            return result

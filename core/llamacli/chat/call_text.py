"""Text of tool calls as it comes, and JSON in it.

Parsers are generators: they yield None where more text is needed, and go on when there is.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Generator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

Reading = Generator[str | None, None, T]
"""Parser that yields normal JSON as it comes, None where it needs more text."""
Awaiting = Generator[None, None, T]
"""Parser that yields None where it needs more text."""

ID = "\ue001"
"""Place of a call's id in the texts of a notation: a character for private use."""

_MAX_DEPTH = 100
_SPACE, _SCALAR, _PLAIN = re.compile(r"\s*"), re.compile(r"[-+.\w]*"), re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\(?:["\\/bfnrt]|u[\da-fA-F]{4})')
_HIGH = re.compile(r"\\u[dD][89abAB]")
_ID = re.compile(r"[\w.:-]*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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

    def fail(self) -> NoReturn:
        """Raise ValueError for the next text."""
        raise ValueError(f"{self.text[self.at : self.at + 80]!r} is not part of a tool call")


@functools.lru_cache(maxsize=512)
def _words(text: str) -> list[str]:
    return text.split()


def json_text(source: CallText, depth: int = 0) -> Reading[None]:
    """Yield a JSON value in its normal form. Raises ValueError."""
    yield from source.space()
    opens = source.next
    if opens == '"':
        yield from _string(source)
    elif opens in "{[" and depth < _MAX_DEPTH:
        closes = "}" if opens == "{" else "]"
        source.at += 1
        yield opens
        yield from source.space()
        if source.next == closes:
            source.at += 1
            yield closes
            return
        while True:
            if opens == "{":
                yield from source.space()
                if source.next != '"':
                    source.fail()
                yield from _string(source)
                yield from source.expect(":")
                yield ": "
            yield from json_text(source, depth + 1)
            yield from source.space()
            if source.next not in (closes, ","):
                source.fail()
            source.at += 1
            yield closes if source.text[source.at - 1] == closes else ", "
            if source.text[source.at - 1] == closes:
                return
    else:
        while True:
            found = _SCALAR.match(source.text, source.at)
            assert found is not None
            if found.end() < len(source.text) or source.final:
                break
            yield from source.more()
        value = normal(json.loads(found[0]))
        source.at = found.end()
        yield value


def _string(source: CallText) -> Reading[None]:
    source.at += 1
    yield '"'
    while True:
        found = _PLAIN.match(source.text, source.at)
        if found:
            source.at = found.end()
            yield normal(found[0])[1:-1]
        if not source.next:
            yield from source.more()
        elif source.next == '"':
            source.at += 1
            yield '"'
            return
        else:
            found = _HIGH.match(source.text, source.at)
            n = 12 if found else 6 if source.text.startswith("\\u", source.at) else 2
            if len(source.text) - source.at < n and not source.final:
                yield from source.more()
                continue
            found = _ESCAPE.match(source.text, source.at)
            if found is None and source.final and len(source.text) - source.at < 6:
                yield from source.more()
            if found is None:
                source.fail()
            source.at = found.end()
            yield normal(json.loads(f'"{found[0]}"'))[1:-1]


def json_value(source: CallText) -> Awaiting[Any]:
    """Parse a JSON value. Raises ValueError."""
    parts: list[str] = []
    for part in json_text(source):
        if part is None:
            yield None
        else:
            parts.append(part)
    return json.loads("".join(parts))


def normal(value: Any) -> str:
    """JSON text of a value, in normal form.

    Lone surrogates become U+FFFD. Raises ValueError for infinite numbers and NaN.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number of JSON")
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


def at_once(reading: Generator[Any, None, T]) -> T:
    """Result of a parser whose text is final."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            result: T = end.value
            return result

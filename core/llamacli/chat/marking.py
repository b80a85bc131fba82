"""Text of messages that a template can work with and that still cannot be taken for the template's own.

What a user types must never become a special token, whatever a template does with it: cut it, join it, put it between
its own brackets. So the mark is in the characters. Before rendering, every character of a message that some special
token contains is replaced by a stand-in, a code point that occurs nowhere in the conversation; afterwards special
tokens are looked for, of which only those are found that the template itself spelled from first to last; then the
characters are put back. For the template's logic to see the text as it is, messages are of a subclass of `str` that
compares, searches and splits as the text it stands for. Where an operation loses the subclass, logic may miss a match,
but the stand-ins stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

import markupsafe

from llamacli.errors import InvalidRequestError

_STAND_INS = range(0xF0000, 0x10FFFE)
"""The supplementary private use areas."""


class Disguise:
    """A one-to-one map from the characters in `hidden` to stand-ins that are not in `used`."""

    def __init__(self, hidden: Iterable[str], used: Iterable[str]):
        cases = {case for c in hidden for case in (c, c.upper(), c.lower()) if len(case) == 1 and not c.isspace()}
        taken = {*used, *cases}
        free = (stand_in for stand_in in map(chr, _STAND_INS) if stand_in not in taken)
        try:
            self._stand_in = {ord(c): next(free) for c in sorted(cases)}
        except (StopIteration, RuntimeError):
            raise InvalidRequestError("the messages use up all private use characters of Unicode") from None
        self._original = {ord(stand_in): chr(c) for c, stand_in in self._stand_in.items()}

    def hide(self, text: str) -> str:
        """Text with stand-ins in the place of the characters to hide."""
        return str.translate(text, self._stand_in)

    def reveal(self, text: str) -> str:
        """The text that `text` stands for, a plain str."""
        return str.translate(text, self._original)

    def mark(self, value: Any) -> Any:
        """A JSON value, all strings in it marked, keys too."""
        if isinstance(value, str):
            return MarkedText(self.hide(value), self)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value


class MarkedText(str):
    """A string of stand-ins that behaves as the text it stands for; what is made of it is marked too."""

    __slots__ = ("_disguise",)
    _disguise: Disguise

    def __new__(cls, hidden: str, disguise: Disguise) -> MarkedText:
        """Text that is hidden already."""
        text = super().__new__(cls, hidden)
        text._disguise = disguise
        return text

    @property
    def _plain(self) -> str:
        return self._disguise.reveal(self)

    def _as_marked(self, hidden: str) -> MarkedText:
        return MarkedText(hidden, self._disguise)

    def _changed(self, plain: str) -> MarkedText:
        """`plain` hidden where this text is, as far as the two can be compared; else all of it."""
        everything = self._disguise.hide(plain)
        if len(plain) != len(self):
            return self._as_marked(everything)
        originals = zip(str.__iter__(self), self._plain, plain, everything, strict=True)
        return self._as_marked("".join(hid if char != old else new for char, old, new, hid in originals))

    # --- as the plain text would answer

    def __eq__(self, other: object) -> bool:
        return self._plain == revealed(other)

    def __ne__(self, other: object) -> bool:
        return self._plain != revealed(other)

    def __lt__(self, other: str) -> bool:
        return self._plain < revealed(other)

    def __le__(self, other: str) -> bool:
        return self._plain <= revealed(other)

    def __gt__(self, other: str) -> bool:
        return self._plain > revealed(other)

    def __ge__(self, other: str) -> bool:
        return self._plain >= revealed(other)

    def __hash__(self) -> int:
        return hash(self._plain)

    def __contains__(self, part: object) -> bool:
        return revealed(part) in self._plain

    # --- text made of this text

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._as_marked(self._disguise.hide(repr(self._plain)))

    def __html__(self) -> str:
        """As it is joined to HTML, escaped."""
        return self._disguise.hide(str(markupsafe.escape(self._plain)))

    def __add__(self, other: str) -> MarkedText:
        if isinstance(other, markupsafe.Markup):
            return NotImplemented
        return self._as_marked(str.__add__(self, other))

    def __radd__(self, other: str) -> MarkedText:
        return self._as_marked(str.__add__(other, self))

    def __mul__(self, n: SupportsIndex) -> MarkedText:
        return self._as_marked(str.__mul__(self, n))

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        return self._as_marked(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return map(self._as_marked, str.__iter__(self))

    def join(self, parts: Iterable[str]) -> MarkedText:
        """See str."""
        return self._as_marked(str.join(self, parts))

    def lstrip(self, chars: str | None = None) -> MarkedText:
        """See str."""
        return self[len(self) - len(self._plain.lstrip(revealed(chars))) :]

    def rstrip(self, chars: str | None = None) -> MarkedText:
        """See str."""
        return self[: len(self._plain.rstrip(revealed(chars)))]

    def strip(self, chars: str | None = None) -> MarkedText:
        """See str."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> MarkedText:
        """See str."""
        return self[len(self) - len(self._plain.removeprefix(revealed(prefix))) :]

    def removesuffix(self, suffix: str) -> MarkedText:
        """See str."""
        return self[: len(self._plain.removesuffix(revealed(suffix)))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """See str."""
        if sep is None:  # white space is never hidden
            return [self._as_marked(piece) for piece in str.split(self, None, maxsplit)]
        return self._located(self._plain.split(revealed(sep), maxsplit), len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """See str."""
        if sep is None:
            return [self._as_marked(piece) for piece in str.rsplit(self, None, maxsplit)]
        return self._located(self._plain.rsplit(revealed(sep), maxsplit), len(sep))

    def _located(self, pieces: list[str], gap: int) -> list[str]:
        """The parts of this text where these pieces of the plain text stand, `gap` characters between them."""
        parts, start = [], 0
        for piece in pieces:
            parts.append(self[start : start + len(piece)])
            start += len(piece) + gap
        return list[str](parts)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """See str."""
        return [self._as_marked(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        """See str."""
        head, found, _ = self._plain.partition(revealed(sep))
        return self[: len(head)], self[len(head) : len(head) + len(found)], self[len(head) + len(found) :]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """See str."""
        head, found, _ = self._plain.rpartition(revealed(sep))
        return self[: len(head)], self[len(head) : len(head) + len(found)], self[len(head) + len(found) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> MarkedText:
        """See str."""
        if not old:
            return self._as_marked(str.replace(self, old, new, count))
        return self._as_marked(new).join(self.split(old, count))


def _as_plain(name: str) -> Callable[..., Any]:
    """A method that asks the plain text: it finds, counts or tests."""

    def method(self: MarkedText, *args: Any) -> Any:
        return getattr(self._plain, name)(*(revealed(arg) for arg in args))

    return method


def _as_changed(name: str) -> Callable[..., MarkedText]:
    """A method that changes characters, in most cases one for one."""

    def method(self: MarkedText) -> MarkedText:
        return self._changed(getattr(self._plain, name)())

    return method


for _name in ("find", "rfind", "index", "rindex", "count", "startswith", "endswith"):
    setattr(MarkedText, _name, _as_plain(_name))
for _name in filter(lambda name: name.startswith("is"), dir(str)):
    setattr(MarkedText, _name, _as_plain(_name))
for _name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase"):
    setattr(MarkedText, _name, _as_changed(_name))


def revealed(value: Any) -> Any:
    """A JSON value as it stands for, nothing in it marked."""
    if isinstance(value, MarkedText):
        return value._plain
    if isinstance(value, Mapping):
        return {revealed(key): revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(revealed, value))
    return value


def joined(separator: str, parts: Iterable[str]) -> str:
    """`separator.join(parts)`, marked if any of them is."""
    parts = list(parts)
    marked = disguise_in([separator, parts])
    text = str.join(separator, parts)
    return MarkedText(text, marked) if marked else text


def disguise_in(value: Any) -> Disguise | None:
    """The disguise that something in a JSON value wears; None if nothing does."""
    if isinstance(value, MarkedText):
        return value._disguise
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next(filter(None, map(disguise_in, value)), None)
    return None

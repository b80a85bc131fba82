"""Taint tracking: text of messages that cannot become special tokens.

What a user types must never become a special token, whatever a template does with it: slice it, join it, put it between
its own brackets. So the taint is in the characters. Before rendering, every character of a message that some special
token contains is replaced by a placeholder, a private-use code point that occurs nowhere in the conversation. Special
tokens found in the rendering were therefore spelled by the template itself. Then the characters are put back.

Templates must see the text as it is. Messages are of a subclass of `str` that compares, searches and splits as the
original text; where Python loses the subclass (`str` of a list, a method of a literal), the environment finds the
placeholders and marks the text again (`CharacterMask.marked`). An operation that cannot keep single characters apart
gets original text, and its whole result is masked.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

import markupsafe

from llamacli.errors import InvalidRequestError
from llamacli.util.cancellation import setting

_PRIVATE_USE = range(0xF0000, 0x10FFFE)
"""Supplementary private use areas of Unicode."""


class CharacterMask:
    """One-to-one map from characters in `hidden` to placeholders not in `used`."""

    def __init__(self, hidden: Iterable[str], used: Iterable[str]):
        cases = {case for c in hidden for case in (c, c.upper(), c.lower()) if len(case) == 1 and not c.isspace()}
        taken = {*used, *cases}
        free = (placeholder for placeholder in map(chr, _PRIVATE_USE) if placeholder not in taken)
        try:
            self._placeholder = {ord(c): next(free) for c in sorted(cases)}
        except (StopIteration, RuntimeError):
            raise InvalidRequestError("the messages use up all private use characters of Unicode") from None
        self.original = {placeholder: chr(c) for c, placeholder in self._placeholder.items()}
        self._originals = str.maketrans(self.original)
        self._any = re.compile(f"[{''.join(self.original)}]" if self.original else "(?!)")

    def mask(self, text: str) -> str:
        """Replace the characters to hide by placeholders."""
        return str.translate(text, self._placeholder)

    def unmask(self, text: str) -> str:
        """Put the original characters back, in a plain str."""
        return str.translate(text, self._originals)

    def taint(self, value: Any) -> Any:
        """Taint all strings in a JSON value, keys too."""
        if isinstance(value, markupsafe.Markup):
            return markupsafe.Markup(self.mask(value))
        if isinstance(value, str):
            return TaintedStr(self.mask(value), self)
        if isinstance(value, Mapping):
            return {self.taint(key): self.taint(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.taint(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def covers(self, value: Any) -> bool:
        """Test for text of messages in a value; bytes count as such."""
        if isinstance(value, str):
            return isinstance(value, TaintedStr) or (not value.isascii() and bool(self._any.search(value)))
        if isinstance(value, Mapping):
            return any(map(self.covers, value.keys())) or any(map(self.covers, value.values()))
        return any(map(self.covers, value)) if isinstance(value, list | tuple) else isinstance(value, bytes)

    def marked(self, value: Any) -> Any:
        """Taint strings with placeholders again, those of a list too."""
        if type(value) is str:
            return TaintedStr(value, self) if self.covers(value) else value
        if type(value) is list:
            return [self.marked(item) if type(item) is str else item for item in value]
        return tuple(self.marked(list(value))) if type(value) is tuple else value

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Make this the mask of the rendering in the current context."""
        return setting(_active, self)


_active: contextvars.ContextVar[CharacterMask | None] = contextvars.ContextVar("_active", default=None)


active_mask = _active.get
"""Function that returns the mask of the rendering in the current context, or None."""


class TaintedStr(str):
    """String of placeholders that behaves as its original text.

    Strings made of it are tainted too.
    """

    __slots__ = ("_mask", "_original")
    _mask: CharacterMask
    _original: str | None

    def __new__(cls, hidden: str, mask: CharacterMask) -> TaintedStr:
        """Wrap text whose characters are masked already."""
        text = super().__new__(cls, hidden)
        text._mask, text._original = mask, None
        return text

    @property
    def _plain(self) -> str:
        if self._original is None:
            self._original = self._mask.unmask(self)
        return self._original

    def _tainted(self, hidden: str) -> TaintedStr:
        return TaintedStr(hidden, self._mask)

    def _changed(self, plain: str) -> TaintedStr:
        """Mask `plain` where this text is masked, whole if the lengths differ."""
        masked = self._mask.mask(plain)
        if len(plain) != len(self):
            return self._tainted(masked)
        originals = zip(str.__iter__(self), self._plain, plain, masked, strict=True)
        return self._tainted("".join(hidden if char != old else new for char, old, new, hidden in originals))

    # Answers of the original text are set below.

    def __hash__(self) -> int:
        return hash(self._plain)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._tainted(self._mask.mask(repr(self._plain)))

    def __html__(self) -> str:
        """Escape for HTML, as markupsafe does."""
        return self._mask.mask(str(markupsafe.escape(self._plain)))

    def __add__(self, other: str) -> TaintedStr:
        if isinstance(other, markupsafe.Markup):
            return NotImplemented
        return self._tainted(str.__add__(self, other))

    def __radd__(self, other: str) -> TaintedStr:
        return self._tainted(str.__add__(other, self))

    def __mul__(self, n: SupportsIndex) -> TaintedStr:
        return self._tainted(str.__mul__(self, n))

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> TaintedStr:
        return self._tainted(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        return map(self._tainted, str.__iter__(self))

    def join(self, parts: Iterable[str]) -> TaintedStr:
        return self._tainted(str.join(self, parts))

    def lstrip(self, chars: str | None = None) -> TaintedStr:
        return self[len(self) - len(self._plain.lstrip(untainted(chars))) :]

    def rstrip(self, chars: str | None = None) -> TaintedStr:
        return self[: len(self._plain.rstrip(untainted(chars)))]

    def strip(self, chars: str | None = None) -> TaintedStr:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> TaintedStr:
        return self[len(self) - len(self._plain.removeprefix(untainted(prefix))) :]

    def removesuffix(self, suffix: str) -> TaintedStr:
        return self[: len(self._plain.removesuffix(untainted(suffix)))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split("split", sep, maxsplit)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split("rsplit", sep, maxsplit)

    def _split(self, method: str, sep: str | None, maxsplit: SupportsIndex) -> list[str]:
        if sep is None:  # white space is never masked
            return [self._tainted(piece) for piece in getattr(str, method)(self, None, maxsplit)]
        parts, start = list[str](), 0
        for piece in getattr(self._plain, method)(untainted(sep), maxsplit):
            parts.append(self[start : start + len(piece)])
            start += len(piece) + len(sep)
        return parts

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [self._tainted(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(*self._plain.partition(untainted(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(*self._plain.rpartition(untainted(sep)))

    def _parted(self, head: str, found: str, _: str) -> tuple[str, str, str]:
        return self[: len(head)], self[len(head) : len(head) + len(found)], self[len(head) + len(found) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TaintedStr:
        if not old:
            return self._tainted(str.replace(self, old, new, count))
        return self._tainted(new).join(self.split(old, count))


def _add_methods(names: Iterable[str], call: Callable[..., Any]) -> None:
    """Add methods to TaintedStr: `call` of text, name and arguments."""

    def made(name: str) -> Callable[..., Any]:
        def method(self: TaintedStr, *args: Any) -> Any:
            return call(self, name, *args)

        method.__name__ = name
        return method

    for name in names:
        setattr(TaintedStr, name, made(name))


_add_methods(  # answers of the original text
    ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "find", "rfind", "index", "rindex",
     "count", "startswith", "endswith", *filter(lambda name: name.startswith("is"), dir(str))),
    lambda self, name, *args: getattr(self._plain, name)(*map(untainted, args)),
)  # fmt: skip
_add_methods(  # other characters, such as their case
    ("upper", "lower", "title", "capitalize", "casefold", "swapcase"),
    lambda self, name: self._changed(getattr(self._plain, name)()),
)
_add_methods(  # characters around the text
    ("center", "ljust", "rjust"), lambda self, name, *args: self._tainted(getattr(str, name)(self, *args))
)

PRECISE = frozenset(name for name in vars(TaintedStr) if not name.startswith("_"))
"""Methods of TaintedStr that keep single characters apart."""


def untainted(value: Any) -> Any:
    """Original text of all strings in a JSON value.

    Strings that have lost their mark are found by the active mask.
    """
    if isinstance(value, TaintedStr):
        return value._plain
    if isinstance(value, str):
        mask = active_mask()
        return type(value)(mask.unmask(value)) if mask and mask.covers(value) else value
    if isinstance(value, Mapping):
        return {untainted(key): untainted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return getattr(value, "_make", type(value))(map(untainted, value))  # a named tuple takes no iterable
    return value


def text_of(value: Any) -> str:
    """Convert a value to text as `str` does, and keep its taint."""
    if isinstance(value, str):
        return value
    mask = active_mask()
    if mask is None:
        return str(value)
    if isinstance(value, bytes | list | tuple | Mapping) and mask.covers(value):
        text: str = mask.taint(str(untainted(value)))
        return text
    found: str = mask.marked(str(value))
    return found


def tainted_join(separator: str, parts: Iterable[str]) -> str:
    """Join as `separator.join(parts)`; the result is tainted if any of them is."""
    parts = list(parts)
    mask = active_mask() or mask_of([separator, parts])
    text = str.join(separator, parts)
    if mask is None or not (mask.covers(text) or mask_of([separator, parts])):
        return text
    return TaintedStr(text, mask)


def mask_of(value: Any) -> CharacterMask | None:
    """Mask of the first tainted string in a JSON value, or None."""
    if isinstance(value, TaintedStr):
        return value._mask
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return next(filter(None, map(mask_of, value)), None)
    return None

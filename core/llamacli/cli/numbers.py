"""Parameter types whose messages name what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import click


def _bounds(kind: Any) -> str:
    if kind.max is None:
        return f"of at least {kind.min:.15g}"
    return f"from {kind.min:.15g} to {kind.max:.15g}"


class Integer(click.IntRange):
    """Integer from `min` to `max`, or of at least `min`."""

    name = "integer"
    bounds = property(_bounds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse an integer."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not an integer {self.bounds}.", param, ctx)


class Number(click.FloatRange):
    """Finite number from `min` to `max`; `bounds` is that in words."""

    name = "number"
    bounds = property(_bounds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number."""
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number {self.bounds}.", param, ctx)
        return number


class IntList(click.ParamType[tuple[int, ...]]):
    """Integers from 0 to `largest`, separated by commas."""

    name = "N,..."

    def __init__(self, largest: int):
        self.largest = largest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse the list."""
        if isinstance(value, tuple):
            return value
        numbers = [part.strip() for part in value.split(",")]
        if not all(number.isdecimal() and len(number) < 10 and int(number) <= self.largest for number in numbers):
            self.fail(f"{value!r} is not a list of integers from 0 to {self.largest}, such as 128,512.", param, ctx)
        return tuple(map(int, numbers))


class Form(click.ParamType[str]):
    """Text that matches a regular expression; messages describe it as `expected`."""

    name = "text"

    def __init__(self, pattern: str, expected: str):
        self.pattern, self.expected = re.compile(pattern), expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check a text."""
        text = str(value)
        if not self.pattern.fullmatch(text):
            self.fail(f"{text!r} is not {self.expected}.", param, ctx)
        return text


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType[int]):
    """Number of bytes, with a unit such as 512M or 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", str(value).strip(), re.ASCII | re.IGNORECASE)
        n_bytes = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
        if n_bytes < 1:
            self.fail(f"{value!r} is not a size such as 512M or 2G.", param, ctx)
        return n_bytes

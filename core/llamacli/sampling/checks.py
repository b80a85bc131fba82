"""Numbers of samplers: converted to Python's own, and refused by name and range."""

from __future__ import annotations

import math
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.util.numbers import is_integer, is_real


def number(default: Any = attrs.NOTHING, *, low: float = -1e6, high: float = 1e6) -> Any:
    """A field that takes finite numbers from `low` to `high`."""

    def check(_: object, attribute: attrs.Attribute[float], value: Any) -> None:
        if not is_real(value) or not math.isfinite(value) or not low <= value <= high:
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not a number from {low:g} to {high:g}")

    return attrs.field(
        default=default, validator=check, converter=lambda value: float(value) if is_real(value) else value
    )


def whole(default: Any = attrs.NOTHING, *, low: int | None = None, high: int | None = None) -> Any:
    """A field that takes whole numbers, from `low` to `high` where these are given."""

    def check(_: object, attribute: attrs.Attribute[int], value: Any) -> None:
        if not is_integer(value):
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not a whole number")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not a whole number {bounds}")

    return attrs.field(
        default=default, validator=check, converter=lambda value: int(value) if is_integer(value) else value
    )

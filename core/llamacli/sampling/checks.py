"""Attrs fields for numeric sampler parameters, with range checks."""

from __future__ import annotations

import math
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.util.numbers import is_integer, is_real


def number(default: Any = attrs.NOTHING, *, low: float = -1e6, high: float = 1e6, **more: Any) -> Any:
    """Field for a finite number from `low` to `high`."""

    def check(_: object, attribute: attrs.Attribute[float], value: Any) -> None:
        if not is_real(value) or not math.isfinite(value) or not low <= value <= high:
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not a number from {low:g} to {high:g}")

    return attrs.field(
        default=default, validator=check, converter=lambda value: float(value) if is_real(value) else value, **more
    )


def integer(default: Any = attrs.NOTHING, *, low: int | None = None, high: int | None = None, **more: Any) -> Any:
    """Field for an integer, from `low` to `high` where given."""

    def check(_: object, attribute: attrs.Attribute[int], value: Any) -> None:
        if not is_integer(value):
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not an integer")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not an integer {bounds}")

    return attrs.field(
        default=default, validator=check, converter=lambda value: int(value) if is_integer(value) else value, **more
    )

"""What a caller can ask of the sampler."""

from __future__ import annotations

import math
from typing import Any

import attrs

from llamacli.checks import is_number, is_whole
from llamacli.errors import InvalidRequestError


def _float(value: float) -> float:
    """A number as Python's own; the validator refuses what is none."""
    return float(value) if is_number(value) else value


def _int(value: int) -> int:
    return int(value) if is_whole(value) else value


def _in_range(low: float, high: float) -> Any:
    def check(_: SamplingParams, attribute: attrs.Attribute[float], value: float) -> None:
        if not is_number(value) or not math.isfinite(value) or not low <= value <= high:
            raise InvalidRequestError(f"{attribute.name} = {value!r} is not a number from {low:g} to {high:g}")

    return check


def _whole(_: SamplingParams, attribute: attrs.Attribute[int], value: int) -> None:
    if not is_whole(value):
        raise InvalidRequestError(f"{attribute.name} = {value!r} is not a whole number")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to draw a token. `SamplingParams()` is greedy: exactly argmax.

    - `temp`: logits are divided by it; 0 or less is greedy.
    - `top_k`: keep the k most probable tokens, and any that tie with the k-th; 0 or less, or n_vocab and more, is off.
    - `top_p`: keep the fewest most probable tokens whose probabilities sum to at least p; 1 is off.
    - `min_p`: drop tokens less probable than this share of the most probable one's; 0 is off.
    - `penalty`: logits of recently generated tokens are divided by it if positive, multiplied if not, once a token
      (Keskar et al. 2019); 1 is off, and so is 0 or less.
    - `penalty_last_n`: how many generated tokens count as recent; 0 or less counts none.
    """

    temp: float = attrs.field(converter=_float, default=0.0, validator=_in_range(-1e6, 1e6))
    top_k: int = attrs.field(converter=_int, default=0, validator=_whole)
    top_p: float = attrs.field(converter=_float, default=1.0, validator=_in_range(0, 1))
    min_p: float = attrs.field(converter=_float, default=0.0, validator=_in_range(0, 1))
    penalty: float = attrs.field(converter=_float, default=1.0, validator=_in_range(-1e6, 1e6))
    penalty_last_n: int = attrs.field(converter=_int, default=64, validator=_whole)

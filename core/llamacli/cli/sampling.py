"""Sampling options, and where their values come from when they are not given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from llamacli.cli.options import FiniteRange

if TYPE_CHECKING:
    from llamacli import SamplingParams
    from llamacli.gguf import Metadata

Decorated = TypeVar("Decorated")

_log = logging.getLogger(__name__)

_KEYS = "general.sampling."


class _Setting(NamedTuple):
    """`key`: in a model's metadata, below `general.sampling.`; `default`: llama.cpp's."""

    field: str
    key: str
    default: float
    flags: tuple[str, ...]
    type: click.FloatRange | click.IntRange
    help: str


_SETTINGS = (
    _Setting("temp", "temp", 0.8, ("--temp", "--temperature"), FiniteRange(0, 1_000_000),
             "Temperature; 0 always takes the likeliest token."),
    _Setting("top_k", "top_k", 40, ("--top-k",), click.IntRange(0),
             "Draw from the k likeliest tokens only; 0 is off."),
    _Setting("top_p", "top_p", 0.95, ("--top-p",), FiniteRange(0, 1),
             "Draw from the likeliest tokens that together reach p; 1 is off."),
    _Setting("min_p", "min_p", 0.05, ("--min-p",), FiniteRange(0, 1),
             "Drop tokens less likely than p times the likeliest; 0 is off."),
    _Setting("penalty", "penalty_repeat", 1.0, ("--repeat-penalty",), FiniteRange(0, 1_000_000),
             "Make tokens that were just written less likely; 1 is off."),
    _Setting("penalty_last_n", "penalty_last_n", 64, ("--repeat-last-n",), click.IntRange(-1),
             "How many tokens count as just written; 0 is none, -1 all."),
)  # fmt: skip


def sampling_options(command: Decorated) -> Decorated:
    """Give a command an option for each setting; its value is None where it was not given."""
    for setting in reversed(_SETTINGS):
        metavar = "N" if isinstance(setting.type, click.IntRange) else "X"
        text = f"{setting.help} Default: the model's, else {setting.default:g}."
        decorate = click.option(*setting.flags, type=setting.type, metavar=metavar, help=text)
        command = decorate(command)  # type: ignore[type-var]
    return command


def sampling_params(given: Mapping[str, Any], metadata: Metadata, seq_len: int) -> SamplingParams:
    """What the options say, else the model's file, else llama.cpp's defaults.

    Raises ModelFormatError for a value in the file that the option would not take.
    """
    from llamacli import SamplingParams

    values = {setting.field: _value(setting, given, metadata) for setting in _SETTINGS}
    if values["penalty_last_n"] < 0:
        values["penalty_last_n"] = seq_len
    known = {_KEYS + setting.key for setting in _SETTINGS}
    ignored = sorted(key for key in metadata if key.startswith(_KEYS) and key not in known)
    if ignored:
        _log.warning("the model's file recommends what there is no option for: %s", ", ".join(ignored))
    return SamplingParams(**values)


def _value(setting: _Setting, given: Mapping[str, Any], metadata: Metadata) -> Any:
    value = given[setting.flags[0].removeprefix("--").replace("-", "_")]
    if value is not None:
        return value
    get: Any = metadata.get_int if isinstance(setting.type, click.IntRange) else metadata.get_float
    return get(_KEYS + setting.key, setting.default, minimum=setting.type.min, maximum=setting.type.max)

"""Default values and ranges of sampling parameters, as in llama.cpp.

The names are the fields of `llamacli.SamplingParams`. The command line needs them before NumPy is imported.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_NUMBER = 1_000_000
"""Upper limit of numbers without a range of their own."""

KEYS = "general.sampling."
"""Prefix of the metadata keys in which a model's file has defaults of its own."""

SEQUENCE_KEY = KEYS + "sequence"
"""Metadata key of the order of samplers: names with semicolons between."""

ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""Order of samplers where a file has none."""


class Default(NamedTuple):
    """Default value of a parameter, an integer or a float.

    `low` and `high` are its range, `high` None where an integer has no limit. `key` is the metadata key below `KEYS`,
    if there is one.
    """

    value: float
    low: float
    high: float | None
    key: str | None = None


DEFAULTS = {
    "temperature": Default(0.8, 0, MAX_NUMBER, "temp"),
    "dynatemp_range": Default(0.0, 0, MAX_NUMBER),
    "dynatemp_exponent": Default(1.0, 0, MAX_NUMBER),
    "top_k": Default(40, 0, None, "top_k"),
    "top_p": Default(0.95, 0, 1, "top_p"),
    "min_p": Default(0.05, 0, 1, "min_p"),
    "typical_p": Default(1.0, 0, 1),
    "top_n_sigma": Default(-1.0, -MAX_NUMBER, MAX_NUMBER),
    "xtc_probability": Default(0.0, 0, 1, "xtc_probability"),
    "xtc_threshold": Default(0.1, 0, 1, "xtc_threshold"),
    "repeat_penalty": Default(1.0, 0, MAX_NUMBER, "penalty_repeat"),
    "frequency_penalty": Default(0.0, -MAX_NUMBER, MAX_NUMBER),
    "presence_penalty": Default(0.0, -MAX_NUMBER, MAX_NUMBER),
    "repeat_last_n": Default(64, -1, None, "penalty_last_n"),
    "dry_multiplier": Default(0.0, 0, MAX_NUMBER),
    "dry_base": Default(1.75, 1, MAX_NUMBER),
    "dry_allowed_length": Default(2, 0, None),
    "dry_penalty_last_n": Default(64, -1, None),
    "mirostat": Default(0, 0, 2, "mirostat"),
    "mirostat_tau": Default(5.0, 0, MAX_NUMBER, "mirostat_tau"),
    "mirostat_eta": Default(0.1, 0, MAX_NUMBER, "mirostat_eta"),
    "adaptive_target": Default(-1.0, -1, 1),
    "adaptive_decay": Default(0.9, 0, 0.99),
}

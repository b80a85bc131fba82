"""Sampling parameters with defaults of the model's file and of llama.cpp."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llamacli.gguf import Metadata
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.registry import FindSampler, sampler_type
from llamacli.util.sampling_params import KEYS, ORDER, PARAMETERS, SEQUENCE_KEY, Parameter

_log = logging.getLogger(__name__)

_KNOWN = frozenset({SEQUENCE_KEY, *(KEYS + one.key for one in PARAMETERS.values() if one.key)})


def params_with_defaults(
    given: Mapping[str, Any], metadata: Metadata, n_ctx: int, find: FindSampler | None = None
) -> SamplingParams:
    """Sampling parameters: those `given` by field name, else the file's, else llama.cpp's.

    `None` counts as not given. A `repeat_last_n` or `dry_penalty_last_n` of -1 is `n_ctx`. `find` looks up samplers
    of plugins; unknown ones in the file are skipped with a warning, as in llama.cpp. Raises ModelFormatError for
    metadata outside of a parameter's range, InvalidRequestError for a value that is not valid.
    """
    values = {field: value for field, value in given.items() if value is not None}
    for field, one in PARAMETERS.items():
        if field not in values:
            values[field] = _file_default(one, metadata) if one.key else one.default
    for field in ("repeat_last_n", "dry_penalty_last_n"):
        if values[field] < 0:
            values[field] = n_ctx
    if "samplers" not in values:
        values["samplers"] = _order(metadata, find)
    ignored = sorted(key for key in metadata if key.startswith(KEYS) and key not in _KNOWN)
    if ignored:
        _log.warning("the model's file has sampling settings without an option: %s", ", ".join(ignored))
    return SamplingParams(**values)


def sampler_names(text: str) -> tuple[str, ...]:
    """Names of samplers in a text with semicolons between."""
    return tuple(filter(None, map(str.strip, text.split(";"))))


def _order(metadata: Metadata, find: FindSampler | None) -> tuple[str, ...]:
    names = sampler_names(metadata.get_str(SEQUENCE_KEY, ""))
    missing = [name for name in names if sampler_type(name, find) is None]
    if missing:
        _log.warning("%s has unknown samplers: %s", SEQUENCE_KEY, ", ".join(missing))
    return tuple(name for name in names if name not in missing) or ORDER


def _file_default(one: Parameter, metadata: Metadata) -> Any:
    get: Any = metadata.get_int if one.is_integer else metadata.get_float
    return get(f"{KEYS}{one.key}", one.default, minimum=one.low, maximum=one.high)

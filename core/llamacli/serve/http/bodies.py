"""JSON bodies of requests: parsing and checking, with paths in error messages."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

from llamacli.serve.errors import BadRequestError
from llamacli.util.memory import anonymous

MAX_DEPTH = 100
"""Deepest nesting of objects and arrays in a body."""

_LARGE, _DECODED = 1 << 16, 16
"""Bytes of a body for which room is looked for, and bytes of memory of each once it is decoded."""

_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE = re.compile(r"\b(str|int|float|bool)\b(?=[^`]*`)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(data: bytes, kind: type = dict) -> Any:
    """Parse a body: a JSON object, or an array for `list`.

    Lone surrogates, which JavaScript makes of truncated texts, become U+FFFD; in keys they are an error. Raises
    BadRequestError; MemoryError for a large body without room for what is decoded, where msgspec 0.22 ends the process.
    """
    if len(data) > _LARGE:
        anonymous(_DECODED * len(data))  # reserved and given back, never written to
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        body = _parse_surrogates(data, error)
    if not isinstance(body, kind):
        name = "array" if kind is list else "object"
        raise BadRequestError(f"the body is not a JSON {name}", None, "invalid_json")
    _check_depth(body)
    return body


def convert(body: Any, kind: Any, *, strict: bool = True) -> Any:
    """Check a body against a schema, or an array against `list[schema]`.

    Without `strict`, texts may be numbers, as in forms. Raises BadRequestError that names the field.
    """
    try:
        return msgspec.convert(body, kind, strict=strict)
    except msgspec.ValidationError as error:
        _raise_invalid(str(error))
    except RecursionError:
        raise _too_deep() from None


def _raise_invalid(text: str) -> NoReturn:
    """Raise the BadRequestError of msgspec's message."""
    found = _PATH.search(text)
    path = found[1].lstrip(".") if found else ""
    reason = _TYPE.sub(lambda name: _JSON_TYPES[name[1]], text[: found.start()] if found else text)
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        raise BadRequestError(f"{path}: it is required", path, "missing_required_parameter") from None
    code = "invalid_type" if ", got " in reason else "invalid_value"
    message = reason[:1].lower() + reason[1:]
    raise BadRequestError(f"{path}: {message}" if path else message, path or None, code) from None


def _parse_surrogates(data: bytes, reason: Exception) -> Any:
    failure = BadRequestError(f"the body is not valid JSON: {reason}", None, "invalid_json")
    if b"\\ud" not in data.lower():
        raise failure from None
    try:
        return _repaired(json.loads(data, parse_constant=_refuse_constant))
    except (ValueError, UnicodeDecodeError):
        raise failure from None
    except RecursionError:
        raise _too_deep() from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    if isinstance(value, dict):
        for key in value:
            if _SURROGATE.search(key):
                raise ValueError("lone surrogate in a key")
        return {key: _repaired(item) for key, item in value.items()}
    return value


def _check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        items = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for values in items for item in values if isinstance(item, dict | list)]


def _too_deep() -> BadRequestError:
    return BadRequestError(f"the body is nested more than {MAX_DEPTH} levels deep", None, "invalid_json")

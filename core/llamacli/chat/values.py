"""Values of arguments by the JSON Schemas of tools."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference.split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    return schema


def kinds_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """JSON types that a schema allows; all if it tells none."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return list(TYPES)
    if isinstance(given := schema.get("type"), str):
        return [given] if given != "number" else ["number", "integer"]
    if isinstance(given, list):
        return [kind for kind in given if isinstance(kind, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return list(dict.fromkeys(kind for part in parts for kind in kinds_of(part, root)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return list(dict.fromkeys(kind for value in values for kind in TYPES if isinstance(value, TYPES[kind])))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else list(TYPES)


TYPES: dict[str, type] = {
    "string": str, "boolean": bool, "integer": int, "number": float, "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def typed_value(text: str, schema: Any = None, root: Mapping[str, Any] | None = None) -> Any:
    """Value of an argument in text, by its schema.

    A string is the text as it is. Other values are JSON or Python literals; text where they are none.
    """
    kinds = kinds_of(schema, root or {})
    if kinds == ["string"]:
        return text
    bare = text.strip()
    value: Any
    if bare in _WORDS:
        value = _WORDS[bare]
    else:
        try:
            value = json.loads(bare)
        except (ValueError, RecursionError):
            value = _python_literal(bare)
    if isinstance(value, str):
        return text if "string" in kinds else value
    known = isinstance(schema, Mapping) and len(kinds) < len(TYPES)
    if known and "string" in kinds and not any(_is(value, kind) for kind in kinds):
        return text
    return value


def part_of(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """Schema of a key or of items, None if there is none."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    properties, own = schema.get("properties"), schema.get("items") if key == "item" else None
    if own is None and isinstance(properties, Mapping):
        own = properties.get(key)
    parts = (part for kind in ("anyOf", "oneOf", "allOf") for part in schema.get(kind) or ())
    return own if own is not None else next(filter(None, (part_of(part, key, root) for part in parts)), None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, object)) or (kind == "number" and isinstance(value, int))


_WORDS = {"True": True, "False": False, "None": None}
"""Values as templates write them that convert arguments with Python's `str`."""


def _python_literal(text: str) -> Any:
    """Value of a list or dictionary in Python's notation, else the text."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return text

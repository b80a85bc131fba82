"""JSON Schemas with closed objects, as llama.cpp's: no properties but those listed."""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def close_objects(schema: Any) -> Any:
    """Add `additionalProperties: false` to objects that list properties.

    Those that say themselves what else they take are left alone, and so are schemas that are combined with others
    (allOf, or properties beside anyOf, oneOf or $ref): each would forbid the properties of the others.
    """
    return _closed(schema, _open_references(schema), is_open=False)


def _closed(schema: Any, open_references: set[str], *, is_open: bool, place: str = "#") -> Any:
    if isinstance(schema, list):
        return [_closed(item, open_references, is_open=is_open, place=f"{place}/{n}") for n, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    is_open = is_open or place in open_references
    combined = is_open or len(_parts(schema)) > 1
    closed = dict(schema)
    for key, value in schema.items():
        at = f"{place}/{key}"
        if key in _MAPS and isinstance(value, dict):
            closed[key] = {
                name: _closed(item, open_references, is_open=False, place=f"{at}/{_escaped(name)}")
                for name, item in value.items()
            }
        elif key in _LISTS:
            closed[key] = _closed(value, open_references, is_open=combined and key != "prefixItems", place=at)
        elif key in _SINGLE:
            closed[key] = _closed(value, open_references, is_open=False, place=at)
    if "properties" in schema and not combined and "unevaluatedProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Parts of a schema that may list properties of one object."""
    members = schema.get("allOf")
    parts = [schema[key] for key in ("properties", "anyOf", "oneOf", "$ref") if key in schema]
    return parts + (members if isinstance(members, list) else [])


def _open_references(schema: Any) -> set[str]:
    """Targets of references that are combined with other schemas."""
    found: set[str] = set()
    waiting = [(schema, False)]
    while waiting:
        part, is_open = waiting.pop()
        if isinstance(part, list):
            waiting += [(item, is_open) for item in part]
        elif isinstance(part, dict):
            is_open = is_open or len(_parts(part)) > 1
            if is_open and isinstance(part.get("$ref"), str):
                found.add(part["$ref"])
            waiting += [(item, is_open and key in _LISTS) for key, item in part.items()]
    return found


def _escaped(name: str) -> str:
    """Name in a JSON Pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")

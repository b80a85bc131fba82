"""JSON Schemas with closed objects, as llama.cpp's: no properties but those listed."""

from __future__ import annotations

import re
from typing import Any

from llamacli.errors import InvalidRequestError

MAX_DEPTH = 100
"""Deepest nesting of a schema, and longest chain of references, each in the definition that the last one names."""

_INDEX = re.compile("[0-9]{1,7}")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def close_objects(schema: Any) -> Any:
    """Add `additionalProperties: false` to objects that list properties.

    Those that say themselves what else they take are left alone, and so are schemas that are combined with others
    (allOf, or properties beside anyOf, oneOf or $ref): each would forbid the properties of the others.
    """
    return _closed(schema, _open_references(schema), is_open=False)


def expect_depth(schema: Any) -> None:
    """Refuse a schema that is nested too deeply, also by references.

    A reference to a definition around it, as of trees, ends a chain. Raises InvalidRequestError.
    """
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"json_schema: line 1: nested too deeply: more than {MAX_DEPTH} levels")
        level = [item for part in level for _, item in _items(part)]
    lengths: dict[str, int] = {}  # of the chains that begin in a definition; 0 while it is looked at
    waiting = [("", _references(schema), 0)]
    while waiting:
        place, references, length = waiting.pop()
        if length + len(waiting) > MAX_DEPTH:
            raise InvalidRequestError(
                f"json_schema: line 1: nested too deeply: a chain of more than {MAX_DEPTH} references"
            )
        if not references:
            lengths[place] = length
            continue
        reference = references[-1]
        if reference in lengths:
            references.pop()
            waiting.append((place, references, max(length, 1 + lengths[reference])))
        else:
            lengths[reference] = 0
            waiting += [(place, references, length), (reference, _references(_definition(schema, reference)), 0)]


def _items(part: Any) -> list[tuple[str, Any]]:
    pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [(str(key), item) for key, item in pairs if isinstance(item, dict | list)]


def _definition(schema: Any, reference: str) -> Any:
    """Target of a reference inside of the schema, None for others."""
    if not reference.startswith("#"):
        return None
    for step in reference.split("/")[1:]:
        if isinstance(schema, list):
            schema = schema[int(step)] if _INDEX.fullmatch(step) and int(step) < len(schema) else None
        else:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def _references(schema: Any) -> list[str]:
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            found[part["$ref"]] = None
        waiting += [item for key, item in _items(part) if key not in ("$defs", "definitions")]
    return list(found)


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
    return name.replace("~", "~0").replace("/", "~1")

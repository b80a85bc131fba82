"""Values of arguments by the schemas of tools."""

from typing import Any

import pytest

from llamacli.chat.values import TYPES, kinds_of, part_of, typed_value

ROOT = {"$defs": {"x/y~": {"type": "integer"}, "r": {"$ref": "#/$defs/x~1y~0"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (None, [*TYPES]),
        (True, [*TYPES]),
        ({}, [*TYPES]),
        ({"type": "string"}, ["string"]),
        ({"type": "number"}, ["number", "integer"]),
        ({"type": ["string", None, "null"]}, ["string", "null"]),
        ({"type": "integer", "properties": {}}, ["integer"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "string"}]}, ["string", "null"]),
        ({"anyOf": [], "oneOf": [{"type": "array"}]}, ["array"]),
        ({"anyOf": "no", "properties": {}}, ["object"]),
        ({"enum": ["a", 1, True, 1.5]}, ["string", "integer", "boolean", "number"]),
        ({"enum": [], "items": {}}, ["array"]),
        ({"const": None}, ["null"]),
        ({"properties": {}, "items": {}}, ["object"]),
        ({"$ref": "#/$defs/r"}, ["integer"]),
        ({"$ref": "#/$defs/none"}, [*TYPES]),
        ({"$ref": "#/$defs/loop"}, [*TYPES]),
        ({"$ref": "other#/$defs/r", "type": "null"}, ["null"]),
        ({"$ref": 1, "type": "null"}, ["null"]),
    ],
)
def test_kinds_of_a_schema(schema: Any, kinds: list[str]) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_references_are_followed_eight_times() -> None:
    def chain(n: int) -> dict[str, Any]:
        return {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {f"d{n}": {"type": "null"}}}

    assert kinds_of({"$ref": "#/$defs/d0"}, chain(7)) == ["null"]
    assert kinds_of({"$ref": "#/$defs/d0"}, chain(8)) == [*TYPES]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" 1 ", {"type": "string"}, " 1 "),
        (" 1 ", {"type": "integer"}, 1),
        (" 1 ", None, 1),
        ("1", {"type": ["string", "integer"]}, 1),
        ("1", {"type": ["string", "null"]}, "1"),
        (" [1] ", {"type": ["string", "null"]}, " [1] "),
        ("1", {"type": ["string", "number"]}, 1),
        ("1.5", {"type": ["string", "integer"]}, "1.5"),
        ("1", {"enum": ["a", 1.5]}, 1),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("true", {"type": ["string", "boolean"]}, True),
        ("1", {"type": ["string", "boolean"]}, "1"),
        ("1", {"type": ["string", "strange"]}, 1),
        ("True", {"type": "boolean"}, True),
        ("None", None, None),
        (' "a" ', {"type": ["string", "null"]}, ' "a" '),
        (' "a" ', {"type": "integer"}, "a"),
        (" a ", {"type": ["integer", "null"]}, "a"),
        ("{'a': (1, None)}", {"type": "object"}, {"a": [1, None]}),
        ("['a', True]", None, ["a", True]),
        ("{1}", None, "{1}"),
        ("[1e999, None]", {"type": "array"}, "[1e999, None]"),
        ("(1, 2)", None, "(1, 2)"),
        ("[" * 100_000, None, "[" * 100_000),
        ("", None, ""),
    ],
)
def test_values_of_texts(text: str, schema: Any, value: Any) -> None:
    found = typed_value(text, schema)
    assert (found, type(found)) == (value, type(value))


PARTS = {"a": {"type": "integer"}, "item": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "key", "part"),
    [
        (None, "a", None),
        ({}, "a", None),
        ({"properties": PARTS}, "a", PARTS["a"]),
        ({"properties": PARTS}, "b", None),
        ({"properties": PARTS}, "item", PARTS["item"]),
        ({"properties": PARTS, "items": True}, "item", True),
        ({"items": {"type": "string"}}, "item", {"type": "string"}),
        ({"items": {"type": "string"}}, "a", None),
        ({"properties": [], "anyOf": [{}, {"properties": PARTS}]}, "a", PARTS["a"]),
        ({"oneOf": [{"$ref": "#/$defs/r"}, {"items": {"type": "string"}}]}, "item", {"type": "string"}),
        ({"properties": {"a": {"type": "null"}}, "allOf": [{"properties": PARTS}]}, "a", {"type": "null"}),
    ],
)
def test_schema_of_a_part(schema: Any, key: str, part: Any) -> None:
    assert part_of(schema, key, ROOT) == part

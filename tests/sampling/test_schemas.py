"""Objects of JSON Schemas that are closed, as llama.cpp's."""

from typing import Any

import pytest

from llamacli.sampling.schemas import close_objects

A, B = {"a": {"type": "string"}}, {"b": {"type": "integer"}}
CLOSED_A = {"properties": A, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"properties": A, "additionalProperties": True},
        {"properties": A, "unevaluatedProperties": True},
        {"allOf": [{"properties": A}, {"properties": B}]},
        {"properties": A, "anyOf": [{"properties": B}, {"required": ["a"]}]},
        {"$defs": {"x": {"properties": A}}, "allOf": [{"$ref": "#/$defs/x"}, {"properties": B}]},
        {"$defs": {"x~/y": {"properties": A}}, "$ref": "#/$defs/x~0~1y", "properties": B},
        {"const": {"properties": A}, "enum": [{"properties": A}]},
    ],
)
def test_schemas_that_stay_as_they_are(schema: Any) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": A}, CLOSED_A),
        ({"items": {"properties": A}}, {"items": CLOSED_A}),
        ({"anyOf": [{"properties": A}, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [{"properties": A}]}, {"allOf": [CLOSED_A]}),
        ({"prefixItems": [{"properties": A}, True]}, {"prefixItems": [CLOSED_A, True]}),
        ({"$defs": {"x": {"properties": A}}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED_A}, "$ref": "#/$defs/x"}),
        (
            {"properties": {"properties": {"properties": A}}},
            {"properties": {"properties": CLOSED_A}, "additionalProperties": False},
        ),
        (
            {"allOf": [{"properties": {"x": {"properties": A}}}, {"properties": B}]},
            {"allOf": [{"properties": {"x": CLOSED_A}}, {"properties": B}]},
        ),
    ],
)
def test_objects_that_list_properties_are_closed(schema: Any, expected: Any) -> None:
    before = repr(schema)
    assert close_objects(schema) == expected
    assert repr(schema) == before

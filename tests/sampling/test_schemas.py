"""Objects of JSON Schemas that are closed, as llama.cpp's."""

from typing import Any

import pytest

from llamacli.errors import InvalidRequestError
from llamacli.sampling.schemas import MAX_DEPTH, close_objects, expect_depth

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


def nested(n: int) -> dict[str, Any]:
    """Arrays in arrays, n levels."""
    return {"items": nested(n - 1)} if n > 1 else {}


def chain(n: int, place: str = "$defs") -> dict[str, Any]:
    """Chain of n references."""
    links = [{"type": "object", "properties": {"a": {"$ref": f"#/{place}/d~1{i + 1}"}}} for i in range(n - 1)]
    return {place: {f"d/{i}": link for i, link in enumerate([*links, {}])}, "items": {"$ref": f"#/{place}/d~10"}}


@pytest.mark.parametrize("make", [nested, chain, lambda n: chain(n, "properties")])
def test_depth_has_a_limit(make: Any) -> None:
    expect_depth(make(MAX_DEPTH))
    with pytest.raises(InvalidRequestError, match="100"):
        expect_depth(make(MAX_DEPTH + 1))


def test_references_to_what_is_around_end_a_chain() -> None:
    names = [f"d{i}" for i in range(60)]
    some = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    expect_depth({"$defs": {name: {"items": some} for name in names}, "items": some})
    expect_depth({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}})
    expect_depth({"items": [{"$ref": "#/items/1"}, {"$ref": "#/items/9"}, {"$ref": "other.json#/x"}, {"$ref": 1}]})

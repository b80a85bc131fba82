"""Values like JSON's, read in pieces of any size, and their grammars."""

from typing import Any

import pytest

from call_texts import BYTES, allows, calls_in, notation_allows, sent
from llamacli.chat.call_text import CallText, at_once
from llamacli.chat.calls import NamedCall, Notation
from llamacli.chat.literals import JSON, PYTHON, Literals, json_value, normal
from llamacli.chat.rules import Rules
from llamacli.errors import InvalidRequestError

pytest.importorskip("llguidance")

BARE = Literals(quotes=("<q>",), bare=True, is_sorted=True)
CALLED = Literals("(", ")", "=", ("'", '"'), bare=True, nested=PYTHON)
"""Arguments as in Python's calls."""

SCHEMAS: dict[str, Any] = {"w": {"type": "object"}, "v": {"type": "object"}}


def notation(form: Literals) -> Notation:
    return Notation(NamedCall("", "" if form.opens == "(" else ":", ";", form))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (JSON, "{}", {}),
        (JSON, ' { "a" : [ ] , "b" : [ 1 , -2.5e3 , true ] } ', {"a": [], "b": [1, -2500.0, True]}),
        (JSON, r'{"a": "\"\\\/\b\f\n\r\t\u00fC\uD83E\uDd8A x"}', {"a": '"\\/\b\f\n\r\tü🦊 x'}),
        (JSON, r'{"a": "\ud83d\u0041\ud83d", "b": "\ud83"}', '{"a": "\ufffdA\ufffd", "b": "'),
        (JSON, r'{"a": "\x41"}', '{"a": "'),
        (JSON, '{"a": 1, }', '{"a": 1, '),
        (JSON, '{"a": [1, ]}', '{"a": [1, '),
        (JSON, "{'a': 1}", "{"),
        (JSON, "{a: 1}", "{"),
        (JSON, '{"a": True}', '{"a": '),
        (JSON, '{"a": (1)}', '{"a": '),
        (JSON, '{"a": .}', '{"a": '),
        (JSON, '{"a": "x" y}', '{"a": "x"'),
        (PYTHON, """{'a': "b", 'c': ['d', (1, 2,), ()], "e": {},}""", {"a": "b", "c": ["d", [1, 2], []], "e": {}}),
        (PYTHON, "{'a': True, 'b': False, 'c': None, 'd': true, 'e': null}", {
            "a": True, "b": False, "c": None, "d": True, "e": None,
        }),
        (PYTHON, "{'a': 'it's', 'b': 'x' y'}", {"a": "it's", "b": "x' y"}),
        (PYTHON, r"{'a': '\x41\v\0\'\U0001F98A\q\u00fc\x4'}", {"a": "A\v\0'🦊\\qü\\x4"}),
        (PYTHON, "{'a': 'b\\\nc'}", {"a": "bc"}),
        (PYTHON, "{'a': one}", '{"a": '),
        (PYTHON, "{a: 1}", "{"),
        (PYTHON, "{'a': 1e999}", '{"a": '),
        (BARE, "{a:<q>x<y\"'<q>,b c:two words}", {"a": "x<y\"'", "b c": "two words"}),
        (BARE, "{d.e: 3 ,f:true}", {"d.e": 3, "f": True}),
        (BARE, "{<q>a<q>:<q><q>,l:[<q>x<q>,{}]}", {"a": "", "l": ["x", {}]}),
        (BARE, "{ : 1}", "{"),
        (BARE, "{a:}", '{"a": '),
        (BARE, r"{a:<q>\n\x41<q>}", {"a": r"\n\x41"}),
    ],
)  # fmt: skip
def test_values(form: Literals, text: str, expected: Any) -> None:
    found = calls_in(notation(form), f"w: {text};", SCHEMAS)
    if isinstance(expected, str):
        assert [name for name, _ in found] == ["w"]
        assert found[0][1].startswith(expected)
        assert not isinstance(found[0][1], dict)
    else:
        assert found == [("w", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w(a=1, b='x', c={'d': [None]});", {"a": 1, "b": "x", "c": {"d": [None]}}),
        ("w();", {}),
        ('w( a = "it\'s" );', {"a": "it's"}),
        ("w(a='x", '{"a": "x'),
        ("w(a='x'", '{"a": "x"'),
        ("w(a=1", '{"a": 1'),
        (r"w(a='\ud8zz", r'{"a": "\\ud8zz'),
        (r"w(a='\ud8z", '{"a": "'),
        ("w", ""),
    ],
)
def test_arguments_as_in_calls_of_python(text: str, expected: Any) -> None:
    assert calls_in(notation(CALLED), text, SCHEMAS) == [("w", expected)]


def test_a_call_may_have_no_arguments() -> None:
    assert calls_in(notation(JSON), "w: ;", SCHEMAS) == [("w", {})]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (JSON, '{"a": "b', '{"a": "b'),
        (JSON, '{"a": "b\\', '{"a": "b'),
        (JSON, '{"a": "b\\n', '{"a": "b\\n'),
        (JSON, '{"a": "\\ud83e', '{"a": "'),
        (JSON, '{"a": "\\u00fc', '{"a": "ü'),
        (JSON, '{"a": 12', '{"a": '),
        (JSON, '{"a": 12,', '{"a": 12'),
        (PYTHON, "{'a': 'b'", '{"a": "b'),
        (PYTHON, "{'a': 'b' ", '{"a": "b'),
        (PYTHON, "{'a': 'b',", '{"a": "b"'),
        (PYTHON, r"{'a': '\x4", '{"a": "'),
        (PYTHON, r"{'a': '\x41", '{"a": "A'),
        (BARE, "{a:<q>b<", '{"a": "b'),
        (BARE, "{a:<q>b<c", '{"a": "b<c'),
        (BARE, "{a:<", '{"a": '),
    ],
)
def test_values_are_sent_as_soon_as_they_are_certain(form: Literals, text: str, expected: str) -> None:
    assert sent(notation(form), f"w:{text}", SCHEMAS) == expected


def test_depth_has_a_limit() -> None:
    assert at_once(json_value(CallText("[" * 100 + "]" * 100, final=True)))
    with pytest.raises(ValueError, match="is not part of a tool call"):
        at_once(json_value(CallText("[" * 101 + "]" * 101, final=True)))


def test_numbers_that_json_lacks() -> None:
    assert normal({"a": 1.5}) == '{"a": 1.5}'
    for number in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="is not a number of JSON"):
            normal(number)


ANY: dict[str, Any] = {"type": "object"}
NEEDED = {
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}, "C": {"type": "boolean"}},
    "required": ["a"],
}


def of(**schema: Any) -> dict[str, Any]:
    return {"properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "schema", "text", "expected"),
    [
        (PYTHON, ANY, "{}", True),
        (PYTHON, ANY, "{'a': [1, 'b', {'c': None}], \"d\": True}", True),
        (PYTHON, ANY, "{'a': }", False),
        (PYTHON, {"properties": {}}, "{}", True),
        (PYTHON, {"properties": {}}, "{'a': 1}", False),
        (PYTHON, {"additionalProperties": False}, "{'a': 1}", False),
        (PYTHON, {"additionalProperties": {"type": "integer"}}, "{'a': 1,'b': 2}", True),
        (PYTHON, {"additionalProperties": {"type": "integer"}}, "{'a': 'x'}", False),
        (PYTHON, NEEDED, "{'b': 1, 'a': 'x', 'C': True}", True),
        (PYTHON, NEEDED, "{'b': 1,'a':'x'}", True),
        (PYTHON, NEEDED, "{'a': 'x', 'C': True}", True),
        (PYTHON, NEEDED, "{\"a\": 'x'}", True),
        (PYTHON, NEEDED, "{'b': 1}", False),
        (PYTHON, NEEDED, "{'a': 'x', 'b': 1}", False),
        (PYTHON, NEEDED, "{'a': 'x',}", False),
        (PYTHON, NEEDED, "{'C': True}", False),
        (PYTHON, {"properties": {"a": {}}, "required": ["new"]}, "{'a': 1, 'new': 2}", True),
        (PYTHON, {"properties": {"a": {}}, "required": ["new"]}, "{'a': 1}", False),
        (BARE, NEEDED, "{a:<q>x<q>,b:1,C:true}", True),
        (BARE, NEEDED, "{a:<q>x<q>,C:true}", True),
        (BARE, NEEDED, "{b:1,a:<q>x<q>}", False),
        (BARE, {"properties": {"a": {"type": "integer"}}, "required": ["a", "new"]}, "{a:1,new:2}", True),
        (BARE, {"properties": {"a b": {"type": "integer"}}}, "{<q>a b<q>:1}", True),
        (BARE, ANY, "{any:<q>x<q>,b.c-d:[{}]}", True),
        (BARE, ANY, "{1:2}", False),
        (BARE, of(const="x"), "{a:<q>x<q>}", True),
        (BARE, of(const=""), "{a:<q><q>}", True),
        (BARE, of(enum=[{"B": 1, "a": ["x"]}]), "{a:{a:[<q>x<q>],B:1}}", True),
        (PYTHON, of(type="integer", minimum=3), "{'a': 3}", True),
        (PYTHON, of(type="integer", minimum=3), "{'a': 2}", False),
        (PYTHON, of(type="boolean", minimum=3), "{'a': True}", True),
        (PYTHON, of(type="null"), "{'a': None}", True),
        (PYTHON, of(type="null"), "{'a': True}", False),
        (PYTHON, of(type="string", nullable=True), "{'a': None}", True),
        (PYTHON, of(type="string"), "{'a': None}", False),
        (PYTHON, of(type=["integer", "string"]), "{'a': 'x'}", True),
        (PYTHON, of(type=["integer", "string"]), "{'a': []}", False),
        (PYTHON, of(type="strange"), "{'a': []}", True),
        (PYTHON, of(type="string"), "{'a': 'it's'}", True),
        (PYTHON, of(type="string"), "{'a': 'x', b'}", False),
        (PYTHON, of(const={"k": [1, "x"]}), "{'a': {'k': [1, 'x']}}", True),
        (PYTHON, of(const={"k": [1, "x"]}), "{'a': {'k': [1, 'y']}}", False),
        (PYTHON, of(const=True), "{'a': True}", True),
        (PYTHON, of(const=True), "{'a': true}", True),
        (PYTHON, of(enum=[1, "b"]), "{'a': \"b\"}", True),
        (PYTHON, of(enum=[1, "b"]), "{'a': 2}", False),
        (PYTHON, of(anyOf=[{"type": "integer"}, {"type": "null"}]), "{'a': None}", True),
        (PYTHON, of(anyOf=[{"type": "integer"}, {"type": "null"}]), "{'a': 'x'}", False),
        (PYTHON, of(allOf=[{"type": "integer"}]), "{'a': 'x'}", False),
        (PYTHON, of(allOf=[{"type": "integer"}, {"minimum": 3}], type="integer"), "{'a': 1}", True),
        (PYTHON, of(anyOf=[], type="integer"), "{'a': 'x'}", False),
        (PYTHON, of(properties={"k": {"type": "integer"}}), "{'a': {'k': 1}}", True),
        (PYTHON, of(properties={"k": {"type": "integer"}}), "{'a': 1}", False),
        (PYTHON, of(items={"type": "integer"}), "{'a': [1, 2]}", True),
        (PYTHON, of(items={"type": "integer"}), "{'a': ['x']}", False),
        (PYTHON, of(type="array", maxItems=0), "{'a': []}", True),
        (PYTHON, of(type="array", maxItems=0), "{'a': [1]}", False),
        (PYTHON, of(type="array", minItems=1), "{'a': []}", False),
        (PYTHON, of(type="array", minItems=1), "{'a': [1]}", True),
        (PYTHON, of(type="array", minItems=2), "{'a': [1]}", False),
        (PYTHON, of(type="array", minItems=2), "{'a': [1, 2, 3]}", True),
        (PYTHON, of(type="array", maxItems=1), "{'a': [1]}", True),
        (PYTHON, of(type="array", maxItems=1), "{'a': [1, 2]}", False),
        (PYTHON, of(type="array", minItems=1, maxItems=1), "{'a': []}", False),
        (PYTHON, of(type="array", maxItems=2), "{'a': [1, 2, 3]}", False),
        (PYTHON, of(type="array", minItems=2, maxItems=2), "{'a': [1, 2]}", True),
        (PYTHON, {**of(**{"$ref": "#/$defs/x~1y~0"}), "$defs": {"x/y~": {"type": "integer"}}}, "{'a': 1}", True),
        (PYTHON, {**of(**{"$ref": "#/$defs/x~1y~0"}), "$defs": {"x/y~": {"type": "integer"}}}, "{'a': 'x'}", False),
        (PYTHON, {"properties": {"a": {"$ref": "#"}}}, "{'a': {'a': {}}}", True),
        (PYTHON, {"properties": {"a": {"$ref": "#"}}}, "{'a': {'b': {}}}", False),
        (JSON, of(type="integer"), '{"a":1}', True),
        (JSON, of(type="integer"), '{"a":"x"}', False),
    ],
)
def test_grammar_of_values(form: Literals, schema: dict[str, Any], text: str, expected: bool) -> None:
    assert notation_allows(notation(form), f"w:{text};", schema) == expected


@pytest.mark.parametrize("reference", ["#/$defs/no", "other#/$defs/x", "#/$defs/x/y"])
def test_references_to_nothing_are_errors(reference: str) -> None:
    schema = {**of(**{"$ref": reference}), "$defs": {"x": {"type": "integer"}}}
    with pytest.raises(InvalidRequestError, match="the schema refers to"):
        PYTHON.grammar(Rules(BYTES), schema)


@pytest.mark.parametrize(
    ("form", "schema", "text", "expected"),
    [
        (JSON, {"$ref": "#/$defs/x"}, "1", True),
        (JSON, {"$ref": "#/$defs/x"}, '"a"', False),
        (JSON, True, "[1]", True),
        (PYTHON, {"$ref": "#/$defs/x"}, "1", True),
        (PYTHON, None, "'a'", True),
    ],
)
def test_grammar_of_one_value(form: Literals, schema: Any, text: str, expected: bool) -> None:
    rules = Rules(BYTES)
    assert allows(rules, form.value(rules, schema, {"$defs": {"x": {"type": "integer"}}}), text) == expected

"""Arguments in tags, read in pieces of any size, and their grammars."""

from typing import Any

import attrs
import pytest

from call_texts import calls_in, notation_allows, sent
from llamacli.chat.call_text import ID
from llamacli.chat.calls import NamedCall, Notation
from llamacli.chat.literals import PYTHON
from llamacli.chat.tags import KEY, Pairs

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object", "properties": {"k": {"type": "string"}}},
        "l": {"type": "array", "items": {"type": "integer"}},
        "e": {"enum": ["red", ""]},
        "m": {"type": ["string", "integer"]},
        "x": {},
    },
}
SCHEMAS: dict[str, Any] = {"w": SCHEMA, "v": {"type": "object"}}


def notation(*args: Any, before: str = "<f=", after: str = ">", ends: str = "</f>", **given: Any) -> Notation:
    return Notation(NamedCall(before, after, ends, Pairs(*args, **given)))


LINES = notation("<p=", (">\n", "\n</p>"), (">\n", "\n</p>"))
QUOTED = notation('<p n="', ('">', "</p>"), ('">', "</p>"), values=PYTHON, quoted=("<![", "]]>"))
TYPED = notation('<p n="', ('" t="s">', "</p>"), ('" t="' + ID + '">', "</p>"))
NAMED = notation("<", (">", f"</{KEY}>"), (">", f"</{KEY}>"))
JOINED = notation("-", ("=", ""), ("=", ""), ";", before="", after="(", ends=")")
BARS = notation("<p ", (":", "||"), (":", "||"))
LONG = "k" * 500


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (LINES, "<f=w></f>", {}),
        (LINES, "<f=w><p=s>\nOslo\n</p></f>", {"s": "Oslo"}),
        (LINES, "<f=w>\n<p=s>\n  a\n\n</p>\n<p=n>\n 3 \n</p>\n</f>", {"s": "  a\n", "n": 3}),
        (LINES, "<f=w><p=s>\na</p>b\n</p</p></p>\n</p></f>", {"s": "a</p>b\n</p</p></p>"}),
        (LINES, "<f=w><p=s>\n\n</p><p=x>\n[1]\n</p></f>", {"s": "", "x": [1]}),
        (LINES, "<f=w><p=s></p></f>", {"s": ""}),
        (LINES, '<f=w><p=o>\n{"k": "a"}\n</p></f>', {"o": {"k": "a"}}),
        (LINES, "<f=w><p=n>\nthree\n</p><p=x>\n1e999\n</p></f>", {"n": "three", "x": "inf"}),
        (LINES, "<f=w>\n<p=s>\nOs", '{"s": "Os'),
        (LINES, "<f=w>\n<p=s>\nOs\n</", '{"s": "Os'),
        (LINES, "<f=w><p=n>\n3", '{"n": '),
        (LINES, "<f=w><p=s>\nOs\n</p> ", '{"s": "Os"'),
        (LINES, "<f=w><p", ""),
        (LINES, "<f=w", ""),
        (LINES, "<f=w><p=a\nb>\n1\n</p></f>", "a\nb>\n1\n</p></f>"),
        (LINES, f"<f=w><p={LONG}>\n1\n</p></f>", {LONG: 1}),
        (LINES, f"<f=w><p={LONG}k>\n1\n</p></f>", f"{LONG}k>\n1\n</p></f>"),
        (LINES, f"<f=w><p={LONG}kk", f"{LONG}kk"),
        (LINES, "<f=w>no</f>", "no</f>"),
        (QUOTED, '<f=w><p n="s">a</p><p n="n">3</p></f>', {"s": "a", "n": 3}),
        (QUOTED, '<f=w><p n="s"><![a</p></f>]]></p></f>', {"s": "a</p></f>"}),
        (QUOTED, '<f=w><p n="m"><![7]]></p><p n="n"><![7]]></p><p n="x">True</p></f>', {"m": "7", "n": 7, "x": True}),
        (TYPED, '<f=w><p n="s" t="s">1</p><p n="n" t="number">1</p></f>', {"s": "1", "n": 1}),
        (NAMED, "<f=w><s>a<b</s></f>", {"s": "a<b"}),
        (NAMED, "<f=w></f>", {}),
        (NAMED, "<f=w><o><k>1</k><j>2</j></o><l><item>1</item><item>2</item></l></f>", {
            "o": {"k": "1", "j": 2}, "l": [1, 2],
        }),
        (NAMED, "<f=w><o> </o><l></l><x></x></f>", {"o": {}, "l": [], "x": ""}),
        (NAMED, "<f=w><o><k>1</o><l><item>1</item>2</l></f>", {"o": "<k>1", "l": "<item>1</item>2"}),
        (NAMED, "<f=w><m><k>1</k></m></f>", {"m": "<k>1</k>"}),
        (JOINED, "w(-s=a;-n=2)", {"s": "a", "n": 2}),
        (JOINED, "w()", {}),
        (JOINED, "w(-s=a;)", {"s": "a;"}),
        (BARS, "<f=w><p s:x|||</f>", {"s": "x|"}),
        (BARS, "<f=w><p s:x||</p||<p n:1||</f>", {"s": "x||</p", "n": 1}),
    ],
)  # fmt: skip
def test_arguments(form: Notation, text: str, expected: Any) -> None:
    assert calls_in(form, text, SCHEMAS) == [("w", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<f=w><p=s>", ""),
        ("<f=w><p=s>\n", ""),
        ("<f=w><p=s>\nOs", '{"s": "Os'),
        ("<f=w><p=s>\nOs\n", '{"s": "Os'),
        ("<f=w><p=s>\nOs\n<", '{"s": "Os'),
        ("<f=w><p=s>\nOs\n<b", '{"s": "Os\\n<b'),
        ("<f=w><p=s>\nOs</p", '{"s": "Os'),
        ("<f=w><p=s>\nOs</p>b", '{"s": "Os</p>b'),
        ("<f=w><p=s>\nOs</p><p", '{"s": "Os'),
        ("<f=w><p=s>\nOs</p><p=", '{"s": "Os"'),
        ("<f=w><p=n>\n31", '{"n": '),
        ("<f=w><p=n>\n31</p></f>", '{"n": 31}'),
    ],
)
def test_texts_are_sent_as_soon_as_they_are_certain(text: str, expected: str) -> None:
    assert sent(LINES, text, SCHEMAS) == expected


NEEDED = {**SCHEMA, "required": ["s", "n", "new"]}
ONE, SOME = {"properties": {"s": {"type": "string"}}, "required": ["s"]}, {"properties": {"s": {"type": "string"}}}


@pytest.mark.parametrize(
    ("form", "schema", "text", "expected"),
    [
        (LINES, ONE, "<f=w><p=s>\na</p\n</p></f>", True),
        (LINES, ONE, "<f=w></f>", False),
        (LINES, SOME, "<f=w></f>", True),
        (LINES, SOME, "<f=w>\n</f>", True),
        (LINES, ONE, "<f=w>\n<p=s>\na\n</p></f>", False),
        (LINES, ONE, "<f=w><p=n>\n1\n</p></f>", False),
        (LINES, NEEDED, "<f=w><p=s>\na\n</p><p=n>\n1\n</p><p=new>\n[1]\n</p></f>", True),
        (LINES, NEEDED, "<f=w><p=s>\na\n</p><p=n>\n1\n</p></f>", False),
        (LINES, NEEDED, "<f=w><p=s>\na\n</p><p=n>\none\n</p><p=new>\n1\n</p></f>", False),
        (LINES, SCHEMA, "<f=w><p=e>\nred\n</p></f>", True),
        (LINES, SCHEMA, "<f=w><p=e>\n\n</p></f>", True),
        (LINES, SCHEMA, "<f=w><p=e>\nblue\n</p></f>", False),
        (LINES, {"properties": {"e": {"const": "a"}}}, "<f=w><p=e>\nb\n</p></f>", False),
        (LINES, {"properties": {"e": {"const": 5}}}, "<f=w><p=e>\n5\n</p></f>", True),
        (LINES, {"properties": {"e": {"enum": ["a", 5]}}}, "<f=w><p=e>\n5\n</p></f>", True),
        (LINES, SCHEMA, "<f=w><p=l>\n[1, 2]\n</p></f>", True),
        (LINES, SCHEMA, '<f=w><p=l>\n["a"]\n</p></f>', False),
        (LINES, {"type": "object"}, "<f=w></f>", True),
        (LINES, {"type": "object"}, "<f=w><p=a>\n1\n</p><p=b.c-d>\nx\n</p></f>", True),
        (LINES, {"type": "object"}, "<f=w><p=1>\n1\n</p></f>", False),
        (LINES, {"type": "object", "properties": {}}, "<f=w></f>", True),
        (LINES, {"type": "object", "properties": {}}, "<f=w><p=a>\n1\n</p></f>", False),
        (LINES, {"additionalProperties": False}, "<f=w><p=a>\n1\n</p></f>", False),
        (TYPED, SCHEMA, '<f=w><p n="m" t="s">a</p></f>', True),
        (TYPED, SCHEMA, '<f=w><p n="m" t="number">7</p></f>', True),
        (TYPED, SCHEMA, '<f=w><p n="m" t="number">a</p></f>', False),
        (TYPED, SCHEMA, '<f=w><p n="s" t="number">7</p></f>', False),
        (QUOTED, SCHEMA, '<f=w><p n="s"><![a]]></p></f>', True),
        (QUOTED, SCHEMA, '<f=w><p n="s"><![a</p></f>', True),
        (QUOTED, {"properties": {"b": {"type": "boolean"}}}, '<f=w><p n="b">True</p></f>', True),
        (NAMED, SCHEMA, "<f=w><s>a</s></f>", True),
        (NAMED, SCHEMA, "<f=w><s>a</n></f>", False),
        (NAMED, SCHEMA, "<f=w><l><item>1</item></l></f>", True),
        (NAMED, SCHEMA, "<f=w><n>a</n></f>", False),
        (NAMED, {"type": "object"}, "<f=w></f>", True),
    ],
)
def test_grammar_of_arguments(form: Notation, schema: dict[str, Any], text: str, expected: bool) -> None:
    assert notation_allows(form, text, schema) == expected


@pytest.mark.parametrize(
    ("needed", "allowed", "others"),
    [
        ("", ("", "-a=1", "-b=2", "-c=3", "-a=1;-c=3", "-b=2;-c=3", "-a=1;-b=2;-c=3"), ("-b=2;-a=1", "-a=1;")),
        ("b", ("-b=2", "-a=1;-b=2", "-b=2;-c=3", "-a=1;-b=2;-c=3"), ("", "-a=1", "-a=1;-c=3", ";-b=2")),
        ("ac", ("-a=1;-c=3", "-a=1;-b=2;-c=3"), ("", "-a=1", "-c=3", "-a=1;-b=2")),
    ],
)  # fmt: skip
def test_grammar_of_arguments_with_text_between(needed: str, allowed: tuple[str, ...], others: tuple[str, ...]) -> None:
    form = attrs.evolve(JOINED, one=attrs.evolve(JOINED.one, arguments=Pairs("-", ("=", "."), ("=", ""), ";")))
    schema = {"properties": {key: {"type": "integer"} for key in "abc"}, "required": [*needed]}
    for text in (*allowed, *others):
        assert notation_allows(form, f"w({text})", schema) == (text in allowed), text

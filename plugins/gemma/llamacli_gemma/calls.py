"""Tool calls of Gemma 4: `call:name{key:value}`, parsed and as a grammar.

Keys are unquoted, strings have quotes of their own, `<|"|>`; numbers, booleans, lists and objects are as in JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamacli.plugin import CALL_SPACE, InvalidRequestError, Rules, Schemas, ToolCall, literal

_QUOTE = '<|"|>'
_WORD = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|(?P<word>[^\s{}\[\],:"<][^{}\[\],:"<]*)""", re.DOTALL
)
"""A string in Gemma 4's quotes or in JSON's, or an unquoted number, name or key."""
_PLAIN_KEY = re.compile(r"\w[\w.$-]*")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_SCALARS = ("integer", "number", "boolean", "null")


def written_calls(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
    """Parse a Gemma 4 tool call. Raises ValueError for anything else."""
    call = re.fullmatch(r"\s*call:\s*([^\s{}]+)\s*(\{.*\})\s*", text, re.DOTALL)
    if not call:
        raise ValueError(f"{text!r} is not a tool call")
    return [ToolCall(call[1], json.loads(_WORD.sub(_as_json, call[2])))]


def _as_json(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return json.dumps(found["text"])
    if found["json"]:
        return found["json"]
    word = found["word"].strip()
    is_key = found.string[found.end() :].startswith(":")
    if not is_key and word in ("None", "null"):
        return "null"
    is_literal = not is_key and re.fullmatch(r"true|false|-?\d+(\.\d+)?([eE][+-]?\d+)?", word)
    return word if is_literal else json.dumps(word)


def call_grammar(rules: Rules, name: str, schema: dict[str, Any]) -> str:
    """Grammar of a call; see `llamacli.chat.syntax.CallGrammar`.

    Types, properties in the order of their names, required ones, enumerations, limits of numbers and of the lengths of
    lists follow the schema; patterns and lengths of strings do not. Raises InvalidRequestError for a reference to
    nothing.
    """
    return f"{literal('call:' + name)} {_Arguments(rules, schema).object(schema)}"


class _Arguments:
    """Writer of rules for the arguments of one tool.

    References begin at `schema`.
    """

    def __init__(self, rules: Rules, schema: dict[str, Any]):
        self._rules, self._root = rules, schema
        self._references: dict[str, str] = {}
        self._any = self._string = ""

    def value(self, schema: Any) -> str:
        """Expression of a value."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any_value()
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        if "const" in schema:
            return self._constant(schema["const"])
        if isinstance(schema.get("enum"), Sequence):
            return _either([self._constant(value) for value in schema["enum"]])
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, Sequence) and parts and (key != "allOf" or len(parts) == 1):
                return _either([self.value(part) for part in parts])
        types = schema.get("type", _type_of(schema))
        named = list(types) if isinstance(types, list) else [types]
        if schema.get("nullable") is True:
            named.append("null")
        return _either([self._typed(name, schema) for name in named])

    def _typed(self, name: Any, schema: Mapping[str, Any]) -> str:
        if name == "string":
            return self._quoted()
        if name in _SCALARS:
            limits = {key: schema[key] for key in _LIMITS if key in schema and name in ("integer", "number")}
            return self._rules.json("scalar", {"type": name, **limits}, CALL_SPACE)
        if name == "array":
            return self._array(schema)
        if name == "object":
            return self.object(schema)
        return self._any_value()

    def object(self, schema: Mapping[str, Any]) -> str:
        """Name of a rule for an object."""
        given, required = schema.get("properties"), schema.get("required")
        properties = dict(given) if isinstance(given, Mapping) else {}
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
        properties = {**dict.fromkeys(needed, True), **properties}
        if not properties:
            return self._pairs(schema.get("additionalProperties", True))
        # From the last property to the first: what may follow at the beginning, and after another property.
        first = after = ""
        for name in sorted(properties, key=lambda name: (name.lower(), name), reverse=True):
            pair = self._rules.add("pair", f'{self._key(name)} ":" {self.value(properties[name])}')
            begins, follows = f"{pair} {after}", f'"," {pair} {after}'
            if name not in needed:
                begins, follows = f"{begins} | {first}" if first else f"({begins})?", f'("," {pair})? {after}'
            first, after = self._rules.add("first", begins), self._rules.add("more", follows)
        return self._rules.add("object", f'"{{" {first} "}}"')

    def _pairs(self, values: Any) -> str:
        if values is False:
            return literal("{}")
        pair = self._rules.add("pair", f'{_ANY_KEY} ":" {self.value(values)}')
        return self._rules.add("object", f'"{{" ({pair} ("," {pair})*)? "}}"')

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rules.add("item", self.value(schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return literal("[]")
        more = f'("," {item}){{{max(0, least - 1)},{most and most - 1}}}'
        items = f"{item} {more}" if least else f"({item} {more})?"
        return self._rules.add("array", f'"[" {items} "]"')

    def _reference(self, reference: str) -> str:
        found = self._references.get(reference)
        if found is None:
            target: Any = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
            if target is None or not reference.startswith("#"):
                raise InvalidRequestError(f"tools: the schema refers to {reference!r}, which it does not have")
            found = self._references[reference] = self._rules.reserve("referred")
            self._rules.define(found, self.value(target))
        return found

    def _any_value(self) -> str:
        if not self._any:
            self._any = self._rules.reserve("value")
            scalar = self._rules.json("scalar", {"type": list(_SCALARS)}, CALL_SPACE)
            items = f'"[" ({self._any} ("," {self._any})*)? "]"'
            self._rules.define(self._any, f"{self._quoted()} | {scalar} | {items} | {self._pairs(True)}")
        return self._any

    def _quoted(self) -> str:
        if not self._string:
            self._string = self._rules.add("string", f"{self._rules.marker(_QUOTE)} {self._rules.until(_QUOTE)}")
        return self._string

    def _key(self, name: str) -> str:
        return literal(name) if _PLAIN_KEY.fullmatch(name) else self._constant(name)

    def _constant(self, value: Any) -> str:
        """Expression of one value."""
        if isinstance(value, str):
            quote = self._rules.marker(_QUOTE)
            return f"{quote} {literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, Mapping):
            pairs = [f'{self._key(key)} ":" {self._constant(value[key])}' for key in sorted(value, key=str.lower)]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._constant, value))} "]"'
        return literal(json.dumps(value))


_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMMA = ' "," '


def _type_of(schema: Mapping[str, Any]) -> str | None:
    """Type that a schema without one describes."""
    return next((kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema), None)


def _either(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"

"""Notations of tool calls: parsers and grammars."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from llamacli.chat.messages import ToolCall
from llamacli.chat.rules import CALL_SPACE, Rules, literal

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the arguments by name of tool; empty if the tools are not known."""

Tools = bool | Sequence[Mapping[str, Any]]
"""Tools that a reply may call, as JSON objects that describe functions; True for tools that are not known."""

CallParser = Callable[[str, Schemas], list[ToolCall]]
"""Parser of the text between the markers of calls. Raises ValueError for text that is no call."""

CallGrammar = Callable[[Rules, str, dict[str, Any]], str]
"""Writer of the grammar of one call: an expression for the rules, the tool's name and the schema of its arguments."""

ID = "\ue001"
"""Place of a call's id in the texts of a notation: a character for private use."""

_ANY_ID, _ID_GRAMMAR = r"[\w.:-]*", "/[a-zA-Z0-9_.:-]{1,64}/"


class IncompleteCallError(ValueError):
    """Text that begins like a tool call and ends within a string."""


def schemas_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments of tools, by name."""
    functions = [] if isinstance(tools, bool) else [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}


class OneCall(Protocol):
    """Notation of one tool call."""

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        """Parse the call at a place.

        Returns a list, as some notations have several in one, and the place after it. Raises ValueError.
        """

    def grammar(self, rules: Rules, name: str, schema: dict[str, Any]) -> str:
        """Grammar of a call; see `CallGrammar`."""


@attrs.frozen
class Notation:
    """Notation of the tool calls between two markers.

    `head` and `tail` are the texts before the first call and after the last one. `between` is the text between two
    calls, None where each call has markers of its own. White space is not compared.
    """

    one: OneCall
    head: str = ""
    between: str | None = None
    tail: str = ""

    def parse(self, text: str, schemas: Schemas) -> list[ToolCall]:
        """Parse all calls. Raises ValueError."""
        calls, at = [], _skip(self.head, text, 0)
        while True:
            found, at = self.one.read(text, at, schemas)
            calls += found
            end = _match(self.tail, text, at)
            if end is not None and not text[end:].strip():
                return calls
            after = _skip(self.between or "", text, at)
            if not text[after:].strip() or (self.between and not text[at:].strip()):
                return calls  # a reply that ends before the last marker
            if self.between is None or (self.between.strip() and after == at):
                raise ValueError(f"{text[at : at + 80]!r} is not part of a tool call")
            at = after


@attrs.frozen
class JsonCall:
    """Tool call as an object in JSON.

    `keys` are its keys in their order; `name` and `arguments` have the name and the arguments, other keys ids or
    types. With an empty `name` the object has one key, the tool's name, whose value are the arguments. `wrapper` is a
    key whose value is the object with these keys.
    """

    name: str = "name"
    arguments: str = "arguments"
    keys: tuple[tuple[str, str], ...] = ()
    wrapper: str = ""

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        """Parse the call at a place, or a list of calls."""
        start = at + len(text[at:]) - len(text[at:].lstrip())
        value, end = decoded(text, start)
        return [self._call(each) for each in (value if isinstance(value, list) else [value])], end

    def _call(self, value: Any) -> ToolCall:
        if isinstance(value, dict) and not self.name and len(value) == 1:
            name, arguments = next(iter(value.items()))
            return ToolCall(name, arguments_of(arguments))
        if isinstance(value, dict) and self.name in value:
            value = {"name": value[self.name], "arguments": value.get(self.arguments, value.get("arguments"))} | (
                {} if self.arguments in value else {k: v for k, v in value.items() if k == "parameters"}
            )
        return json_call(value)

    def grammar(self, rules: Rules, name: str, schema: dict[str, Any]) -> str:
        """Grammar of a call: keys in their order."""
        if not self.name:
            values: dict[str, Any] = {name: {"$ref": f"#/$defs/{_ARGUMENTS}"}}
        else:
            special = {self.name: {"const": name}, self.arguments: {"$ref": f"#/$defs/{_ARGUMENTS}"}}
            ids = {"type": "string", "pattern": "^[a-zA-Z0-9_.:-]{1,64}$"}
            given = self.keys or ((self.name, ""), (self.arguments, ""))
            values = {key: special.get(key, {"const": fixed} if fixed else ids) for key, fixed in given}
        call: dict[str, Any] = _object(values)
        if self.wrapper:
            call = _object({self.wrapper: call})
        return rules.json("json_call", {**call, "$defs": {_ARGUMENTS: moved(schema)}}, CALL_SPACE)


@attrs.frozen
class Pairs:
    """Arguments as a key and a value in tags each.

    `opens` comes before a key, then a text between key and value and one after the value: `string` for strings, which
    are written as they are, and `other` for values in JSON. `between` comes between two arguments. `words` are the
    literals true, false and null where the template writes Python's.
    """

    opens: str
    string: tuple[str, str]
    other: tuple[str, str]
    between: str = ""
    words: bool = False

    def read(self, text: str, at: int, schema: Mapping[str, Any], end: str) -> tuple[dict[str, Any], int]:
        """Parse arguments up to the text `end`."""
        arguments: dict[str, Any] = {}
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        begins = _pattern(self.opens)
        while found := begins.match(text, at):
            key, value, at = self._pair(text, found.end(), end)
            arguments[key] = typed_value(value, properties.get(key), schema)
            at = _skip(self.between, text, at)
        return arguments, at

    def _pair(self, text: str, at: int, end: str) -> tuple[str, str, int]:
        for middle, closes in dict.fromkeys((self.string, self.other)):
            found = _middle(middle).search(text, at)
            if found is None or "\n" in text[at : found.start()].strip():
                continue
            follows = "|".join(_source(each) for each in (self.between + self.opens, end) if each.strip()) or r"\s*$"
            ends = re.compile(_value_end(closes) + rf"(?=\s*(?:{follows}|$))", re.DOTALL)
            done = ends.search(text, found.end())
            if done is None:
                raise IncompleteCallError(f"{text[at : at + 80]!r} has no end")
            return text[at : found.start()].strip(), text[found.end() : done.start()], done.end()
        raise IncompleteCallError(f"{text[at : at + 80]!r} is not an argument")

    def grammar(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Expression of the arguments, in the order of the schema."""
        properties, required = schema.get("properties"), schema.get("required")
        given = dict(properties) if isinstance(properties, Mapping) else {}
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
        given = {**given, **{name: True for name in needed if name not in given}}
        if not given and schema.get("additionalProperties") is not False and "properties" not in schema:
            key = rules.add("pair", self._written(rules, r"/[A-Za-z_][A-Za-z0-9_.-]*/", True, schema))
            return f"({key} ({expression(rules, self.between)} {key})*)?"
        if self.between.strip():
            return self._joined(rules, given, needed, schema)
        pairs = []
        for name, value in given.items():
            pair = rules.add("pair", self._written(rules, literal(name), value, schema))
            pairs.append(pair if name in needed else f"{pair}?")
        return " ".join(pairs)

    def _joined(self, rules: Rules, given: Mapping[str, Any], needed: Sequence[str], root: Mapping[str, Any]) -> str:
        """Expression of arguments with a text between two of them."""
        comma, first, after = expression(rules, self.between), "", ""
        for name in list(given)[::-1]:
            pair = rules.add("pair", self._written(rules, literal(name), given[name], root))
            begins, follows = f"{pair} {after}", f"{comma} {pair} {after}"
            if name not in needed:
                begins, follows = (f"{begins} | {first}" if first else f"({begins})?"), f"({comma} {pair})? {after}"
            first, after = rules.add("first", begins), rules.add("more", follows)
        return first

    def _written(self, rules: Rules, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Expression of one argument."""
        kinds = _kinds(schema, root)
        alternatives = []
        given = schema if isinstance(schema, Mapping) else {}
        constants = given.get("enum", [given["const"]] if "const" in given else None)
        middle, closes = self.string
        if isinstance(constants, Sequence) and constants and all(isinstance(each, str) for each in constants):
            either = " | ".join(literal(each) if each else '""' for each in constants)
            alternatives = [f"{expression(rules, middle)} ({either}) {expression(rules, closes)}"]
        elif "string" in kinds:
            alternatives = [f"{expression(rules, middle)} {rules.until(closes)}"]
        others = [kind for kind in kinds if kind != "string"]
        if others and not (alternatives and self.string == self.other):
            middle, closes = self.other
            given = {"type": others[0] if len(others) == 1 else others} if "string" in kinds else schema
            value = rules.json("value", _with_definitions(given, root), CALL_SPACE)
            if self.words and "boolean" in others and len(others) == 1:
                value = '("True" | "False" | "true" | "false")'
            elif self.words and {"boolean", "null"} & set(others):
                value = f'({value} | "True" | "False" | "None")'
            alternatives.append(f"{expression(rules, middle)} {value} {expression(rules, closes)}")
        return f"{expression(rules, self.opens)} {key} ({' | '.join(alternatives)})"


@attrs.frozen
class NamedCall:
    """Tool call as a name and arguments.

    Arguments are an object in JSON, or `pairs` in tags. `before` is the text before the name, `after` between name and
    arguments, `ends` after the arguments. The texts may have an `ID`.
    """

    before: str = ""
    after: str = ""
    ends: str = ""
    pairs: Pairs | None = None

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        """Parse the call at a place."""
        at = _skip(self.before, text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        known = "|".join(re.escape(name) for name in sorted(schemas, key=len, reverse=True)) or r"[^\s<>\[\]{}(),:\"]+"
        follows = _source(self.after, optional_id=True)
        found = re.compile(rf"({known})\s*{follows}", re.DOTALL).match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 80]!r} does not begin with the name of a tool")
        name, at = found[1], found.end()
        arguments: Any
        if self.pairs is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            if text[at : at + 1] != "{":
                arguments = {}
                if text[at:].strip() and not self.ends.strip():
                    raise ValueError(f"{text[at : at + 80]!r} is not an object in JSON")
            else:
                arguments, at = decoded(text, at)
        else:
            arguments, at = self.pairs.read(text, at, schemas.get(name, {}), self.ends)
        end = _match(self.ends, text, at)
        if end is None and text[at:].strip():
            raise ValueError(f"{text[at : at + 80]!r} is not the end of a tool call")
        return [ToolCall(name, arguments_of(arguments))], len(text) if end is None else end

    def grammar(self, rules: Rules, name: str, schema: dict[str, Any]) -> str:
        """Grammar of a call; see `CallGrammar`."""
        if self.pairs is None:
            arguments = rules.json("arguments", schema, CALL_SPACE)
        else:
            arguments = self.pairs.grammar(rules, schema)
        begins = f"{expression(rules, self.before)} {literal(name)} {expression(rules, self.after)}"
        return f"{begins} {arguments} {expression(rules, self.ends)}"


# --- texts of notations


def expression(rules: Rules, text: str) -> str:
    """Expression of a text of a notation, for grammars."""
    return f" {_ID_GRAMMAR} ".join(rules.marker(part) if part else "" for part in text.split(ID))


@functools.lru_cache(maxsize=512)
def _source(text: str, optional_id: bool = False) -> str:
    """Regular expression of a text, any white space for white space."""
    words = [re.escape(word).replace(re.escape(ID), _ANY_ID) for word in text.split()]
    del optional_id
    return r"\s*" + r"\s*".join(words) if words else ""


@functools.lru_cache(maxsize=512)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(_source(text), re.DOTALL)


@functools.lru_cache(maxsize=512)
def _middle(text: str) -> re.Pattern[str]:
    """Pattern of the text between a key and a value.

    White space after it is the value's, but for a line's end.
    """
    tail = text[len(text.rstrip()) :]
    return re.compile((_source(text) or r"\s*") + (r"\n?" if "\n" in tail else ""))


@functools.lru_cache(maxsize=512)
def _value_end(text: str) -> str:
    """Regular expression of the text after a value."""
    words = text.split()
    before = r"\n?" if text[: len(text) - len(text.lstrip())].count("\n") else ""
    return before + r"\s*".join(map(re.escape, words)) if words else before


def _match(text: str, within: str, at: int) -> int | None:
    """Place after a text of the notation, None without it."""
    found = _pattern(text).match(within, at)
    return found.end() if found else None


def _skip(text: str, within: str, at: int) -> int:
    """Place after a text of the notation, or the same place."""
    found = _match(text, within, at)
    return at if found is None else found


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


_ARGUMENTS = "arguments"


def moved(schema: Any) -> Any:
    """Copy of a schema whose references begin at the arguments' definition."""
    if isinstance(schema, list):
        return [moved(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: moved(value) for key, value in schema.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = f"#/$defs/{_ARGUMENTS}{reference[1:]}"
    return copy


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """Schema of one argument with the definitions that it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **shared} if isinstance(schema, Mapping) and shared else schema


# --- values


def _kinds(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """JSON types that a schema allows; all if it tells none."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference.split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    if not isinstance(schema, Mapping):
        return list(_TYPES)
    if isinstance(given := schema.get("type"), str):
        return [given] if given != "number" else ["number", "integer"]
    if isinstance(given, list):
        return [kind for kind in given if isinstance(kind, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return list(dict.fromkeys(kind for part in parts for kind in _kinds(part, root)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return list(dict.fromkeys(kind for value in values for kind in _TYPES if isinstance(value, _TYPES[kind])))
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else list(_TYPES)


_TYPES: dict[str, type] = {
    "string": str, "boolean": bool, "integer": int, "number": float, "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def typed_value(text: str, schema: Any = None, root: Mapping[str, Any] | None = None) -> Any:
    """Value of an argument in text, by its schema.

    A string is the text as it is. Other values are JSON or Python literals; text where they are none.
    """
    kinds = _kinds(schema, root or {})
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
    known = isinstance(schema, Mapping) and len(kinds) < len(_TYPES)
    if known and "string" in kinds and not any(_is(value, kind) for kind in kinds):
        return text
    return value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object)) or (kind == "number" and isinstance(value, int))


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


# --- JSON


def decoded(text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at a place.

    Returns the value and the place after it. Raises IncompleteCallError for a value without its end, else ValueError.
    """
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
            raise IncompleteCallError(str(error)) from None
        raise


def json_calls(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
    """Parse tool calls in JSON, one or several.

    They are bare or in a list, each with a "name" and "arguments" or "parameters". Raises ValueError for anything else.
    """
    values, at = list[Any](), 0
    while at < len(text):
        value, end = decoded(text, at + len(text[at:]) - len(text[at:].lstrip()))
        values += value if isinstance(value, list) else [value]
        at = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n;,"))
    if not values:
        raise ValueError("no tool call")
    return [json_call(value) for value in values]


def json_call(value: Any) -> ToolCall:
    """Tool call of an object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a tool call")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    return ToolCall(name, arguments_of(value.get("arguments", value.get("parameters"))))


def arguments_of(value: Any) -> dict[str, Any]:
    """Arguments by name, of an object or its JSON text.

    None and empty text mean none. Raises ValueError.
    """
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a JSON object of arguments")
    return value


def tagged_calls(call: str, argument: str) -> CallParser:
    """Make a parser of tool calls in tags, one or several.

    `call` and `argument` are regular expressions with the groups `name` and `arguments`, and `name` and `value`. Values
    have the types of the tool's schema: strings are the text as it is, others are JSON. The parser raises ValueError
    for anything else.
    """
    one_call, one_argument = re.compile(rf"\s*{call}\s*", re.DOTALL), re.compile(rf"\s*{argument}\s*", re.DOTALL)

    def parse(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
        calls = []
        for found in _consecutive(one_call, text):
            schema = (schemas or {}).get(found["name"], {})
            properties = schema.get("properties") or {}
            pairs = {each["name"]: each["value"] for each in _consecutive(one_argument, found["arguments"].strip())}
            values = {key: typed_value(value, properties.get(key), schema) for key, value in pairs.items()}
            calls.append(ToolCall(found["name"], values))
        if not calls:
            raise ValueError("no tool call")
        return calls

    return parse


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that together are the whole text. Raises ValueError."""
    found, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise IncompleteCallError(f"{text[at : at + 80]!r} is not part of a tool call")
        found.append(match)
        at = match.end()
    return found


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def checked(calls: Iterable[ToolCall], schemas: Schemas) -> Iterator[ToolCall]:
    """Calls that JSON in UTF-8 can express: lone surrogates become U+FFFD.

    Raises ValueError for arguments with infinite numbers or NaN, and for a name that is none of the tools.
    """
    for call in calls:
        text = json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False)
        name, arguments = json.loads(_LONE_SURROGATE.sub("\ufffd", text))
        if schemas and name not in schemas:
            raise ValueError(f"{name!r} is not the name of a tool")
        yield attrs.evolve(call, name=name, arguments=arguments)

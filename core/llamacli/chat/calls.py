"""Notations of tool calls: parsers and grammars."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from llamacli.chat.call_text import (
    ID,
    Awaiting,
    CallText,
    IncompleteCallError,
    at_once,
    json_text,
    json_value,
    normal,
)
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

CallReading = Generator[tuple[str, str | None] | None, None, None]
"""Parser of calls as they come: names with text of the arguments in JSON, and with None at the end of each call.

It yields None where it needs more text. Raises ValueError, IncompleteCallError at the end of the text.
"""

KEY = "\ue002"
"""Place of an argument's key in the text after its value."""

_ID_GRAMMAR = "/[a-zA-Z0-9_.:-]{1,64}/"
_SEPARATORS = re.compile(r"[\s;,]*")
_ANY_NAME = re.compile(r"[^\s<>\[\]{}(),:\"]+")
_NAME_GOES_ON = re.compile(r"[\w.-]")
_LONGEST_KEY = 500


def schemas_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments of tools, by name."""
    functions = [] if isinstance(tools, bool) else [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}


class OneCall(Protocol):
    """Notation of one tool call."""

    def read(self, source: CallText, schemas: Schemas, follows: Sequence[str]) -> CallReading:
        """Parse the next call, which one of the texts `follows` comes after."""

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

    def read(self, source: CallText, schemas: Schemas, closes: str) -> CallReading:
        """Parse all calls, up to the marker that closes them."""
        yield from source.take(self.head)
        end = f"{self.tail} {closes}"
        while True:
            yield from self.one.read(source, schemas, (self.between or "", self.tail, closes))
            if not (yield from self._goes_on(source, end, closes)):
                return

    def _goes_on(self, source: CallText, end: str, closes: str) -> Awaiting[bool]:
        """Skip the text after a call; returns whether another one follows."""
        while True:
            texts = [end] if end.strip() else []
            texts += [text for text in (self.between, closes) if text and text.strip()]
            ends = {text: source.fits(text) for text in texts}
            found = next((text for text in texts if (ends[text] or 0) >= 0 or ends[text] is None), None)
            if found is not None and ends[found] is not None:
                source.at = ends[found] or 0
                return found == self.between
            if found is None:
                separators = _SEPARATORS.match(source.text, source.at)
                assert separators is not None
                if separators.end() < len(source.text):
                    is_json = isinstance(self.one, JsonCall)
                    if is_json and source.text[separators.end()] in "{[":
                        source.at = separators.end()
                        return True
                    if not is_json and self.between is not None and not self.between.strip():
                        return True
                    if end.strip():
                        source.fail()
                    return False
            if source.final:
                source.at = len(source.text)
                return False
            yield None


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

    def read(self, source: CallText, schemas: Schemas, follows: Sequence[str] = ()) -> CallReading:
        """Parse the next call, or a list of calls."""
        yield from source.space()
        if source.next != "[":
            yield from self._object(source, schemas)
            return
        while source.next != "]":
            source.at += 1
            yield from self._object(source, schemas)
            yield from source.space()
            if source.next not in ("]", ","):
                source.fail()
        source.at += 1

    def _object(self, source: CallText, schemas: Schemas) -> Generator[tuple[str, str | None] | None, None, bool]:
        """Parse an object; returns whether a call was in it."""
        name, arguments, is_made = "", None, False
        yield from source.expect("{")
        try:
            while True:
                yield from source.space()
                if source.next != '"':
                    source.fail()
                key = yield from json_value(source)
                yield from source.expect(":")
                yield from source.space()
                if not self.name:
                    yield from arguments_in(source, known_name(key, schemas))
                    is_made = True
                elif key in (self.name, "name") and source.next == '"':
                    name = known_name((yield from json_value(source)), schemas)
                elif key in (self.wrapper, "function") and source.next == "{" and not is_made:
                    is_made = yield from self._object(source, schemas)
                elif key in (self.arguments, "arguments", "parameters") and name and not is_made:
                    yield from arguments_in(source, name)
                    is_made = True
                else:
                    value = yield from json_value(source)
                    arguments = value if key in (self.arguments, "arguments", "parameters") else arguments
                yield from source.space()
                if source.next == "}":
                    break
                yield from source.expect(",")
        except IncompleteCallError:
            if name and not is_made:
                yield name, ""
            raise
        source.at += 1
        if not is_made:
            if not name:
                raise ValueError("a tool call without a name")
            yield name, normal(arguments_of(arguments))
            yield name, None
        return True

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

    Where the text after a value names the key, as `KEY`, values are texts, and objects and lists are tags within, those
    of a list named `item`. `nested` is that text while the tags of one key are read.
    """

    opens: str
    string: tuple[str, str]
    other: tuple[str, str]
    between: str = ""
    words: bool = False
    nested: str = ""

    def read(self, source: CallText, name: str, schema: Mapping[str, Any], follows: Sequence[str]) -> CallReading:
        """Parse arguments, which one of the texts `follows` comes after."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        begun = "{"
        ambiguous = [text for text in follows if text.strip().startswith(self.opens.strip())]
        while not (yield from _comes(source, ambiguous)) and (yield from source.take(self.opens)):
            key = yield from self._key(source)
            yield name, f"{begun}{normal(key)}: "
            begun = ", "
            ends = (self.between + self.opens, *follows)
            named = self._closed_by(key)
            yield from named._value(source, name, properties.get(key), schema, [text for text in ends if text.strip()])
            yield from source.take(self.between)
        if any(text.strip() for text in follows):
            yield from _followed(source, follows)
        yield name, "{}" if begun == "{" else "}"

    def _key(self, source: CallText) -> Awaiting[str]:
        """Skip a key and the text after it."""
        while True:
            matches = [_middle(middle).search(source.text, source.at) for middle, _ in (self.string, self.other)]
            found = min(filter(None, matches), key=lambda each: (each.start(), -each.end()), default=None)
            key = source.text[source.at : found.start() if found else None].strip()
            if (found and "\n" in key) or len(key) > _LONGEST_KEY:
                source.fail()
            if found and (found.end() < len(source.text) or source.final):
                source.at = found.end()
                return key
            yield from source.more()

    def _value(
        self, source: CallText, name: str, schema: Any, root: Mapping[str, Any], follows: Sequence[str]
    ) -> CallReading:
        """Parse a value, a string as it comes."""
        closes = self.string[1] if self.string[1].strip() else self.other[1]
        is_text, begin, sent = _kinds(schema, root) == ["string"], source.at, source.at
        if is_text:
            yield name, '"'
        while True:
            end, after = _value_end(source, max(source.at, begin), closes, follows)
            source.at = end
            if closes[: len(closes) - len(closes.lstrip())].count("\n") and source.text.endswith("\n", begin, end):
                end -= 1
            if is_text and end > sent:
                yield name, normal(source.text[sent:end])[1:-1]
                sent = end
            if after >= 0:
                break
            yield from source.more()
        source.at = after
        yield name, '"' if is_text else _written_value(self._typed(source.text[begin:end], schema, root))

    def _closed_by(self, key: str) -> Pairs:
        """Tags of one key."""
        if KEY not in self.string[1]:
            return self
        middle, closes = self.string
        named = middle, closes.replace(KEY, key)
        return attrs.evolve(self, string=named, other=named, nested=closes)

    def _typed(self, text: str, schema: Any, root: Mapping[str, Any]) -> Any:
        """Value of a text, with the tags within it."""
        kinds = _kinds(schema, root)
        if self.nested and ("string" not in kinds or len(kinds) == len(_TYPES)):
            if not text.strip() and kinds in (["array"], ["object"]):
                return [] if kinds == ["array"] else {}
            with contextlib.suppress(ValueError):
                return self._nested(CallText(text, final=True), schema, root)
        return typed_value(text, schema, root)

    def _nested(self, source: CallText, schema: Any, root: Mapping[str, Any]) -> Any:
        """List or object of tags within a value. Raises ValueError."""
        found: list[tuple[str, Any]] = []
        while at_once(source.take(self.opens)):
            key = at_once(self._key(source))
            end, after = _value_end(source, source.at, self.nested.replace(KEY, key), ())
            if after < 0:
                source.fail()
            found.append((key, self._typed(source.text[source.at : end], _part(schema, key, root), root)))
            source.at = after
        if not found or source.text[source.at :].strip():
            source.fail()
        return [value for _, value in found] if {key for key, _ in found} == {"item"} else dict(found)

    def grammar(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Expression of the arguments, in the order of the schema."""
        properties, required = schema.get("properties"), schema.get("required")
        given = dict(properties) if isinstance(properties, Mapping) else {}
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
        given = {**given, **{name: True for name in needed if name not in given}}
        if not given and schema.get("additionalProperties") is not False and "properties" not in schema:
            if KEY in self.string[1]:
                return ""
            key = rules.add("pair", self._written(rules, r"/[A-Za-z_][A-Za-z0-9_.-]*/", True, schema))
            return f"({key} ({expression(rules, self.between)} {key})*)?"
        if self.between.strip():
            return self._joined(rules, given, needed, schema)
        pairs = []
        for name, value in given.items():
            pair = rules.add("pair", self._closed_by(name)._written(rules, literal(name), value, schema))
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
            if self.nested and {"array", "object"} & set(others):
                return f"{expression(rules, self.opens)} {key} {expression(rules, middle)} {rules.until(closes)}"
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

    def read(self, source: CallText, schemas: Schemas, follows: Sequence[str] = ()) -> CallReading:
        """Parse the next call."""
        yield from source.take(self.before)
        yield from source.space()
        name = yield from self._name(source, schemas)
        follows = (self.ends, *follows)
        if self.after.strip():
            yield name, ""
        if self.pairs is not None:
            yield from self.pairs.read(source, name, schemas.get(name, {}), follows)
        else:
            yield from source.space()
            if source.next == "{":
                yield from _pieces(json_text(source), name)
            else:
                yield from _followed(source, follows)
                yield name, "{}"
        yield name, None
        yield from source.take(self.ends)

    def _name(self, source: CallText, schemas: Schemas) -> Awaiting[str]:
        """Skip the longest name of a tool and the text after it."""
        while True:
            rest = source.text[source.at : source.at + _LONGEST_KEY]
            bare = _ANY_NAME.match(rest)
            for name in sorted(schemas, key=len, reverse=True) or [bare[0] if bare else "\n"]:
                end: int | None = -1
                if rest.startswith(name):
                    is_cut = not rest[len(name) :].strip() and (bool(self.after.strip()) or not source.final)
                    goes_on = not self.after.strip() and _NAME_GOES_ON.match(rest, len(name))
                    end = None if is_cut else -1 if goes_on else source.fits(self.after, source.at + len(name))
                elif name.startswith(rest):
                    end = None
                if end is None:
                    break
                if end >= 0:
                    source.at = end
                    return name
            else:
                raise ValueError(f"{rest[:80]!r} does not begin with the name of a tool")
            yield from source.more()

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
def _middle(text: str) -> re.Pattern[str]:
    """Pattern of the text between a key and a value.

    White space after it is the value's, but for a line's end.
    """
    tail = text[len(text.rstrip()) :]
    words = r"\s*".join(re.escape(word).replace(re.escape(ID), r"[\w.:-]*") for word in text.split())
    return re.compile(rf"\s*{words}" + (r"\n?" if "\n" in tail else ""))


def _comes(source: CallText, texts: Sequence[str]) -> Awaiting[bool]:
    """Test for one of some texts, which are not skipped."""
    while texts:
        ends = [source.fits(text) for text in texts]
        if any(end is not None and end >= 0 for end in ends):
            return True
        if None not in ends or source.final:
            break
        yield None
    return False


def _followed(source: CallText, follows: Sequence[str]) -> Awaiting[None]:
    """Wait for one of some texts. Raises ValueError for another."""
    while True:
        ends = [source.fits(text) for text in follows if text.strip()]
        if any(end is not None and end >= 0 for end in ends):
            return
        if None not in ends and source.text[source.at :].strip():
            source.fail()
        yield from source.more()


def _value_end(source: CallText, at: int, closes: str, follows: Sequence[str]) -> tuple[int, int]:
    """Find the text that closes a value, with one that follows it.

    Returns the place up to which the text is certainly the value's, and the place after its end, -1 for none yet.
    """
    begins = [text.split()[0] for text in ([closes] if closes.strip() else follows)]
    while True:
        place = min((each for each in (source.text.find(text, at) for text in begins) if each >= 0), default=-1)
        if place < 0:
            end = len(source.text)
            partial = (n for text in begins for n in range(1, len(text)) if source.text.endswith(text[:n], at))
            end -= max(partial, default=0)
            return end - source.text.endswith("\n", at, end), -1
        end_of_it = source.fits(closes, place)
        if end_of_it is None:
            return place, -1
        if end_of_it >= 0:
            ends = [source.fits(text, end_of_it) for text in follows]
            if any(end is not None and end >= 0 for end in ends) or not follows:
                return place, end_of_it
            if source.final and not source.text[end_of_it:].strip():
                return place, end_of_it
            if None in ends:
                return place, -1
        at = place + 1


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


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Schema that a reference names."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference.split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    return schema


def _kinds(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """JSON types that a schema allows; all if it tells none."""
    schema = _resolved(schema, root)
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


def _written_value(value: Any) -> str:
    """JSON of an argument; a string where JSON cannot express it."""
    try:
        return normal(value)
    except ValueError:
        return normal(str(value))


def _part(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """Schema of a key or of items, None if there is none."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    properties, own = schema.get("properties"), schema.get("items") if key == "item" else None
    if own is None and isinstance(properties, Mapping):
        own = properties.get(key)
    parts = (part for kind in ("anyOf", "oneOf", "allOf") for part in schema.get(kind) or ())
    return own if own is not None else next(filter(None, (_part(part, key, root) for part in parts)), None)


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


def _pieces(text: Generator[str | None, None, None], name: str) -> CallReading:
    for piece in text:
        yield None if piece is None else (name, piece)


def arguments_in(source: CallText, name: str) -> CallReading:
    """Parse arguments: an object, or its text in a string."""
    yield from source.space()
    if source.next == "{":
        yield from _pieces(json_text(source), name)
    else:
        yield name, normal(arguments_of((yield from json_value(source))))
    yield name, None


def known_name(name: Any, schemas: Schemas) -> str:
    """Name of a tool. Raises ValueError for another one."""
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    if schemas and name not in schemas:
        raise ValueError(f"{name!r} is not the name of a tool")
    return name


def json_calls(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
    """Parse tool calls in JSON, one or several.

    They are bare or in a list, each with a "name" and "arguments" or "parameters". Raises ValueError for anything else.
    """
    source, calls, texts = CallText(text, final=True), list[ToolCall](), list[str]()
    for item in JSON_CALLS.read(source, schemas or {}, ""):
        name, piece = item or ("", "")
        if piece is not None:
            texts.append(piece)
        else:
            calls.append(ToolCall(name, arguments_of("".join(texts))))
            texts = []
    if source.text[source.at :].strip():
        source.fail()
    return calls


JSON_CALLS = Notation(JsonCall())
"""Notation of calls as objects in JSON."""


def whole_calls(parse: CallParser, source: CallText, schemas: Schemas, closes: str) -> CallReading:
    """Parse calls with a parser of their whole text."""
    n_tried = source.at
    while True:
        end = source.text.find(closes, n_tried) if closes else -1
        if end >= 0 or source.final:
            try:
                calls = parse(source.text[source.at : end if end >= 0 else None], schemas)
            except IncompleteCallError:
                if end < 0:
                    raise
                n_tried = end + 1
                continue
            texts = [(known_name(call.name, schemas), normal(call.arguments)) for call in calls]
            source.at = end + len(closes) if end >= 0 else len(source.text)
            for name, text in texts:
                yield name, text
                yield name, None
            return
        yield None


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

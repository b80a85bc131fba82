"""Notations of tool calls: parsers and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from llamacli.chat.call_text import Awaiting, CallReading, CallText, IncompleteCallError, expression
from llamacli.chat.literals import JSON, json_value, normal
from llamacli.chat.messages import ToolCall
from llamacli.chat.rules import CALL_SPACE, Rules, literal
from llamacli.chat.values import typed_value

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the arguments by name of tool; empty if the tools are not known."""

Tools = bool | Sequence[Mapping[str, Any]]
"""Tools that a reply may call, as JSON objects that describe functions; True for tools that are not known."""

CallParser = Callable[[str, Schemas], list[ToolCall]]
"""Parser of the text between the markers of calls. Raises ValueError for text that is no call."""

CallGrammar = Callable[[Rules, str, dict[str, Any]], str]
"""Writer of the grammar of one call: an expression for the rules, the tool's name and the schema of its arguments."""

_SEPARATORS = re.compile(r"[\s;,]*")
_ANY_NAME = re.compile(r"[^\s<>\[\]{}(),:\"]+")
_NAME_GOES_ON = re.compile(r"[\w.-]")
_LONGEST_NAME = 500


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

    def __call__(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:
        """Parse calls, all of the text. Raises ValueError for anything else."""
        source, calls, texts = CallText(text, final=True), list[ToolCall](), list[str]()
        for item in self.read(source, schemas or {}, ""):
            name, piece = item or ("", "")
            if piece is not None:
                texts.append(piece)
            else:
                calls.append(ToolCall(name, arguments_of("".join(texts))))
                texts = []
        if source.text[source.at :].strip():
            source.fail()
        return calls

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

    @property
    def is_by_hand(self) -> bool:
        """True if its keys are not known: it may be a list."""
        return bool(self.name) and not self.keys

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
        name, arguments, is_made, has_others = "", None, False, False
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
                    if key in (self.arguments, "arguments", "parameters"):
                        arguments = value
                    has_others = has_others or isinstance(value, dict | list)
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
            if arguments is None and has_others:
                raise ValueError("arguments of a tool call under another key")
            yield name, normal(arguments_of(arguments))
            yield name, None
        return True

    def grammar(self, rules: Rules, name: str, schema: dict[str, Any]) -> str:
        """Grammar of a call; see `CallGrammar`.

        Keys come in their order; without `keys` a name, and arguments under either usual key.
        """
        arguments = {"$ref": f"#/$defs/{_ARGUMENTS}"}
        if not self.name:
            call = _object({name: arguments})
        elif self.keys:
            special = {self.name: {"const": name}, self.arguments: arguments}
            ids = {"type": "string", "pattern": "^[a-zA-Z0-9_.:-]{1,64}$"}
            call = _object({key: special.get(key, {"const": fixed} if fixed else ids) for key, fixed in self.keys})
        else:
            usual = ("arguments", "parameters")
            call = {"anyOf": [_object({"name": {"const": name}, key: arguments}) for key in usual]}
        if self.wrapper:
            call = _object({self.wrapper: call})
        return rules.json("json_call", {**call, "$defs": {_ARGUMENTS: moved(schema)}}, CALL_SPACE)


class Arguments(Protocol):
    """Notation of the arguments of a call."""

    def read(self, source: CallText, name: str, schema: Mapping[str, Any], follows: Sequence[str]) -> CallReading:
        """Parse arguments, which one of the texts `follows` comes after."""

    def grammar(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Expression of the arguments."""


@attrs.frozen
class NamedCall:
    """Tool call as a name and arguments.

    `before` is the text before the name, `after` between name and arguments, `ends` after the arguments. The texts may
    have an `ID`.
    """

    before: str = ""
    after: str = ""
    ends: str = ""
    arguments: Arguments = JSON

    def read(self, source: CallText, schemas: Schemas, follows: Sequence[str] = ()) -> CallReading:
        """Parse the next call."""
        yield from source.take(self.before)
        yield from source.space()
        name = yield from self._name(source, schemas)
        if self.after.strip():
            yield name, ""
        try:
            yield from self.arguments.read(source, name, schemas.get(name, {}), (self.ends, *follows))
        except IncompleteCallError:
            yield name, ""  # a call that is cut before its arguments
            raise
        yield name, None
        yield from source.take(self.ends)

    def _name(self, source: CallText, schemas: Schemas) -> Awaiting[str]:
        """Skip the longest name of a tool and the text after it."""
        while True:
            rest = source.text[source.at : source.at + _LONGEST_NAME]
            bare = _ANY_NAME.match(rest)
            for name in sorted(schemas, key=len, reverse=True) or [bare[0] if bare else "\n"]:
                end: int | None = -1
                if rest.startswith(name):
                    is_cut = not rest[len(name) :].strip() and (bool(self.after.strip()) or not source.final)
                    goes_on = not self.after.strip() and _NAME_GOES_ON.match(rest, len(name))
                    end = None if is_cut else -1 if goes_on else source.fits(self.after, source.at + len(name))
                elif name.startswith(rest):
                    end = None
                if end is None and source.final and rest.startswith(name):
                    end = len(source.text)
                if end is None:
                    break
                if end >= 0:
                    source.at = end
                    return name
            else:
                source.fail()
            yield from source.more()

    def grammar(self, rules: Rules, name: str, schema: dict[str, Any]) -> str:
        """Grammar of a call; see `CallGrammar`."""
        begins = f"{expression(rules, self.before)} {literal(name)} {expression(rules, self.after)}"
        return f"{begins} {self.arguments.grammar(rules, schema)} {expression(rules, self.ends)}"


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


def arguments_in(source: CallText, name: str) -> CallReading:
    """Parse arguments: an object, or its text in a string."""
    yield from source.space()
    if source.next == "{":
        yield from JSON.read(source, name, {}, ())
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


json_calls = Notation(JsonCall())
"""Tool calls in JSON, each with a "name" and "arguments" or "parameters"."""


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

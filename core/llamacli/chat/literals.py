"""Values in tool calls: JSON, and notations like it.

Values are parsed as they come, to JSON in its normal form, and have a grammar by their schema.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.call_text import Awaiting, CallReading, CallText, Reading
from llamacli.chat.rules import CALL_SPACE, Rules, literal
from llamacli.errors import InvalidRequestError

_MAX_DEPTH = 100
_SCALAR, _BARE = re.compile(r"[-+.\w]*"), re.compile(r'[^{}\[\]()=,:"<]*')
_ESCAPE = re.compile(r'\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\(?:["\\/bfnrt]|u[\da-fA-F]{4})')
_PYTHON_ESCAPE = re.compile(r"\\(?:x[\da-fA-F]{2}|U000[\da-fA-F]{5}|[av0'\n])")
_HIGH = re.compile(r"\\u[dD][89abAB]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ENDS_STRING = re.compile(r"\s*[,:)\]}]")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_PLAIN_KEY = re.compile(r"\w[\w.$-]*")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_SCALARS = ("integer", "number", "boolean", "null")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_PYTHON_STRING = "/" + "|".join(r"Q([^Q\\]|\\(.|\n)|Q+[^Q\\,:)\]}\s])*Q+".replace("Q", q) for q in ("'", '"')) + "/"
"""A string whose quotes need no escape where a string cannot end."""


@attrs.frozen
class Literals:
    """Notation of values like JSON's.

    - `opens`, `closes`, `assigns`: the texts around an object, and between a key and its value.
    - `quotes`: the texts around strings, the first as the template writes them. With an apostrophe values are Python's.
    - `bare`: keys have no quotes, and words that are no value are strings.
    - `is_sorted`: keys come in the order of their names.
    - `nested`: the notation of values within, None for the same one.
    """

    opens: str = "{"
    closes: str = "}"
    assigns: str = ":"
    quotes: tuple[str, ...] = ('"',)
    bare: bool = False
    is_sorted: bool = False
    nested: Literals | None = None

    def read(self, source: CallText, name: str, schema: Mapping[str, Any], follows: Sequence[str]) -> CallReading:
        """Parse the arguments of a call, none before one of `follows`."""
        yield from source.space()
        if source.next == self.opens:
            for piece in self.text(source):
                yield None if piece is None else (name, piece)
        else:
            yield from source.followed(follows)
            yield name, "{}"

    def text(self, source: CallText, depth: int = 0) -> Reading[None]:
        """Yield a value in normal JSON. Raises ValueError."""
        yield from source.space()
        quote = yield from self._quote(source)
        if quote:
            yield from self._string(source, quote)
        elif depth < _MAX_DEPTH and source.next == self.opens:
            yield from self._items(source, self.closes, "{}", depth)
        elif depth < _MAX_DEPTH and (source.next == "[" or (self._is_python and source.next == "(")):
            yield from self._items(source, "]" if source.next == "[" else ")", "[]", depth)
        else:
            word = yield from self._word(source, _BARE if self.bare else _SCALAR)
            try:
                value = normal(self._scalar(word))
            except ValueError:
                source.fail()
            source.at += len(word)
            yield value

    def _items(self, source: CallText, closes: str, brackets: str, depth: int) -> Reading[None]:
        source.at += 1
        yield brackets[0]
        n_items = 0
        while True:
            yield from source.space()
            if source.next == closes and (not n_items or self._is_python):
                break
            if n_items:
                yield ", "
            if brackets == "{}":
                yield from self._key(source)
                yield from source.expect(self.assigns)
                yield ": "
            yield from (self.nested or self).text(source, depth + 1)
            n_items += 1
            yield from source.space()
            if source.next == closes:
                break
            yield from source.expect(",")
        source.at += 1
        yield brackets[1]

    def _key(self, source: CallText) -> Reading[None]:
        quote = yield from self._quote(source)
        if quote:
            yield from self._string(source, quote)
        elif not self.bare:
            source.fail()
        else:
            key = yield from self._word(source, _BARE)
            if not key.strip():
                source.fail()
            source.at += len(key)
            yield normal(key.strip())

    def _quote(self, source: CallText) -> Awaiting[str]:
        """Quote that comes next, "" for none."""
        while True:
            rest = source.text[source.at : source.at + max(map(len, self.quotes))]
            found = next((quote for quote in self.quotes if rest.startswith(quote)), "")
            if found or source.final or not any(quote.startswith(rest) for quote in self.quotes):
                return found
            yield None

    def _word(self, source: CallText, pattern: re.Pattern[str]) -> Awaiting[str]:
        """Next word, which is not skipped."""
        while True:
            found = pattern.match(source.text, source.at)
            assert found is not None
            if found.end() < len(source.text) or source.final:
                return found[0]
            yield from source.more()

    def _scalar(self, text: str) -> Any:
        if self == JSON:
            return json.loads(text)
        bare = text.strip()
        if bare in _WORDS:
            return _WORDS[bare]
        try:
            return json.loads(bare)
        except ValueError:
            if self.bare and bare:
                return bare
            raise

    @property
    def _is_python(self) -> bool:
        return "'" in self.quotes

    def _string(self, source: CallText, quote: str) -> Reading[None]:
        source.at += len(quote)
        yield '"'
        plain = re.compile(
            rf"[^{re.escape(quote[0])}\\]+" if len(quote) == 1 else rf"(?:(?!{re.escape(quote[0])}).)+", re.S
        )
        while True:
            found = plain.match(source.text, source.at)
            if found:
                source.at = found.end()
                yield normal(found[0])[1:-1]
            rest = source.text[source.at : source.at + len(quote)]
            if not rest or (rest != quote and quote.startswith(rest)):
                yield from source.more()
            elif rest[0] == "\\" and len(quote) == 1:
                yield normal((yield from self._escaped(source)))[1:-1]
            elif rest == quote and (yield from self._ends_at(source, source.at + len(quote))):
                source.at += len(quote)
                yield '"'
                return
            else:
                source.at += 1
                yield normal(rest[0])[1:-1]

    def _ends_at(self, source: CallText, at: int) -> Awaiting[bool]:
        """Test whether a quote before the place ends its string."""
        while self._is_python and not source.final and source.after_space(at) == len(source.text):
            yield None
        is_last = source.after_space(at) == len(source.text)
        return not self._is_python or is_last or _ENDS_STRING.match(source.text, at) is not None

    def _escaped(self, source: CallText) -> Awaiting[str]:
        """Character of an escape. Raises ValueError for another."""
        while True:
            rest = source.text[source.at : source.at + 12]
            n = 12 if _HIGH.match(rest) else {"u": 6, "U": 10, "x": 4}.get(rest[1:2], 2)
            found = _ESCAPE.match(rest)
            python = _PYTHON_ESCAPE.match(rest) if self._is_python and not found else None
            if len(rest) < n and not (source.final and (found or python)) and (not source.final or len(rest) < 6):
                yield from source.more()
                continue
            if found is None and python is None and not self._is_python:
                source.fail()
            end = found or python
            source.at += end.end() if end else 1
            text: str = json.loads(f'"{found[0]}"') if found else ast.literal_eval(f'"{python[0]}"') if python else "\\"
            return text

    def grammar(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Expression of the arguments of a call.

        In JSON all of the schema holds. In other notations patterns and the lengths of strings do not. Raises
        InvalidRequestError for a reference to nothing.
        """
        if self == JSON:
            return rules.json("arguments", dict(schema), CALL_SPACE)
        return _Writer(rules, schema).object(self, schema)

    def value(self, rules: Rules, schema: Any, root: Mapping[str, Any]) -> str:
        """Expression of a value by its schema, whose references begin at `root`."""
        if self == JSON:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return rules.json("value", {**schema, **shared} if isinstance(schema, Mapping) else schema, CALL_SPACE)
        return _Writer(rules, root).value(self, schema)


JSON = Literals()
"""JSON as RFC 8259 has it."""
PYTHON = Literals(quotes=("'", '"'))
"""Python's literals; true, false and null count too."""


class _Writer:
    """Writer of rules for the values of one tool.

    References begin at `schema`.
    """

    def __init__(self, rules: Rules, schema: Mapping[str, Any]):
        self._rules, self._root = rules, schema
        self._names: dict[Any, str] = {}

    def value(self, form: Literals, schema: Any) -> str:
        """Expression of a value."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any_value(form)
        if isinstance(schema.get("$ref"), str):
            return self._reference(form, schema["$ref"])
        if "const" in schema:
            return self._constant(form, schema["const"])
        if isinstance(schema.get("enum"), Sequence):
            return _either([self._constant(form, value) for value in schema["enum"]])
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, Sequence) and parts and (key != "allOf" or len(parts) == 1):
                return _either([self.value(form, part) for part in parts])
        kinds = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else None)
        named = [*kinds] if isinstance(kinds, list) else [kinds]
        if schema.get("nullable") is True:
            named.append("null")
        return _either([self._typed(form, name, schema) for name in named])

    def _typed(self, form: Literals, name: Any, schema: Mapping[str, Any]) -> str:
        if name == "string":
            return self._string(form)
        if name in _SCALARS:
            limits = {key: schema[key] for key in _LIMITS if key in schema and name in ("integer", "number")}
            return self._scalar(form, {"type": name, **limits})
        if name == "array":
            return self._array(form, schema)
        return self.object(form, schema) if name == "object" else self._any_value(form)

    def object(self, form: Literals, schema: Mapping[str, Any]) -> str:
        """Name of a rule for an object."""
        given, required = schema.get("properties"), schema.get("required")
        properties = dict(given) if isinstance(given, Mapping) else {}
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
        properties = {**dict.fromkeys(needed, True), **properties} if form.is_sorted else {
            **properties, **{name: True for name in needed if name not in properties}
        }  # fmt: skip
        if not properties:
            values = {} if "properties" in schema else schema.get("additionalProperties", True)
            return self._pairs(form, False if "properties" in schema else values)
        # From the last property to the first: what may follow at the beginning, and after another property.
        names = sorted(properties, key=lambda name: (name.lower(), name)) if form.is_sorted else list(properties)
        first = after = ""
        for name in reversed(names):
            value = self.value(form.nested or form, properties[name])
            pair = self._rules.add("pair", f"{self._key(form, name)} {self._assigns(form)} {value}")
            begins, follows = f"{pair} {after}", f"{_COMMA} {pair} {after}"
            if name not in needed:
                begins, follows = f"{begins} | {first}" if first else f"({begins})?", f"({_COMMA} {pair})? {after}"
            first, after = self._rules.add("first", begins), self._rules.add("more", follows)
        return self._rules.add("object", f"{literal(form.opens)} {first} {literal(form.closes)}")

    def _assigns(self, form: Literals) -> str:
        return literal(form.assigns) + (' " "?' if not form.bare else "")

    def _pairs(self, form: Literals, values: Any) -> str:
        if values is False:
            return literal(form.opens + form.closes)
        key = _ANY_KEY if form.bare else self._string(form)
        pair = self._rules.add("pair", f"{key} {self._assigns(form)} {self.value(form.nested or form, values)}")
        items = f"({pair} ({_COMMA} {pair})*)?"
        return self._rules.add("object", f"{literal(form.opens)} {items} {literal(form.closes)}")

    def _array(self, form: Literals, schema: Mapping[str, Any]) -> str:
        item = self._rules.add("item", self.value(form, schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return literal("[]")
        more = f"({_COMMA} {item}){{{max(0, least - 1)},{most and most - 1}}}" if most != 1 else ""
        items = f"{item} {more}" if least else f"({item} {more})?"
        return self._rules.add("array", f'"[" {items} "]"')

    def _reference(self, form: Literals, reference: str) -> str:
        found = self._names.get((form, reference))
        if found is None:
            target: Any = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
            if target is None or not reference.startswith("#"):
                raise InvalidRequestError(f"tools: the schema refers to {reference!r}, which it does not have")
            found = self._names[form, reference] = self._rules.reserve("referred")
            self._rules.define(found, self.value(form, target))
        return found

    def _any_value(self, form: Literals) -> str:
        if (found := self._names.get(form)) is None:
            found = self._names[form] = self._rules.reserve("value")
            items = f'"[" ({found} ({_COMMA} {found})*)? "]"'
            scalar = self._scalar(form, {"type": list(_SCALARS)})
            self._rules.define(found, f"{self._string(form)} | {scalar} | {items} | {self._pairs(form, True)}")
        return found

    def _scalar(self, form: Literals, schema: dict[str, Any]) -> str:
        value = self._rules.json("scalar", schema, CALL_SPACE)
        words = [word for kind, word in (("boolean", '"True" | "False"'), ("null", '"None"')) if kind in schema["type"]]
        return f"({value} | {' | '.join(words)})" if words and "'" in form.quotes else value

    def _string(self, form: Literals) -> str:
        if (found := self._names.get(form.quotes)) is None:
            quote = form.quotes[0]
            rule = f"{self._rules.marker(quote)} {self._rules.until(quote)}" if len(quote) > 1 else _PYTHON_STRING
            found = self._names[form.quotes] = self._rules.add("string", rule)
        return found

    def _key(self, form: Literals, name: str) -> str:
        return literal(name) if form.bare and _PLAIN_KEY.fullmatch(name) else self._constant(form, name)

    def _constant(self, form: Literals, value: Any) -> str:
        if isinstance(value, str):
            if len(form.quotes[0]) == 1:
                return f"({literal(repr(value))} | {literal(json.dumps(value, ensure_ascii=False))})"
            quote = self._rules.marker(form.quotes[0])
            return f"{quote} {literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, Mapping):
            names = sorted(value, key=str.lower) if form.is_sorted else list(value)
            pairs = [
                f"{self._key(form, key)} {self._assigns(form)} {self._constant(form, value[key])}" for key in names
            ]
            return f"{literal('{')} {f' {_COMMA} '.join(pairs)} {literal('}')}"
        if isinstance(value, list):
            return f'"[" {f" {_COMMA} ".join(self._constant(form, item) for item in value)} "]"'
        return f"({literal(json.dumps(value))} | {literal(repr(value))})"


_COMMA = '"," " "?'


def _either(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def json_value(source: CallText) -> Awaiting[Any]:
    """Parse a JSON value. Raises ValueError."""
    parts: list[str] = []
    for part in JSON.text(source):
        if part is None:
            yield None
        else:
            parts.append(part)
    return json.loads("".join(parts))


def normal(value: Any) -> str:
    """JSON text of a value, in normal form.

    Lone surrogates become U+FFFD. Raises ValueError for infinite numbers and NaN.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number of JSON")
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))

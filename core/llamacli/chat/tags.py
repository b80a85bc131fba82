"""Arguments of tool calls in tags."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.call_text import ID, Awaiting, CallReading, CallText, at_once, expression
from llamacli.chat.literals import JSON, Literals, normal
from llamacli.chat.rules import Rules, literal
from llamacli.chat.values import TYPES, kinds_of, part_of, typed_value

KEY = "\ue002"
"""Place of an argument's key in the text after its value."""

_LONGEST_KEY = 500


@attrs.frozen
class Pairs:
    """Arguments as a key and a value in tags each.

    `opens` comes before a key, then a text between key and value and one after the value: `string` for strings, which
    are written as they are, and `other` for values, which are in the notation `values`. `between` comes between two
    arguments. `quoted` are the texts around strings that have markup in them.

    Where the text after a value names the key, as `KEY`, values are texts, and objects and lists are tags within, those
    of a list named `item`. `nested` is that text while the tags of one key are read.
    """

    opens: str
    string: tuple[str, str]
    other: tuple[str, str]
    between: str = ""
    values: Literals = JSON
    quoted: tuple[str, str] = ("", "")
    nested: str = ""

    def read(self, source: CallText, name: str, schema: Mapping[str, Any], follows: Sequence[str]) -> CallReading:
        """Parse arguments, which one of the texts `follows` comes after."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        begun = "{"
        ambiguous = [text for text in follows if text.strip().startswith(self.opens.strip())]
        while not (yield from source.comes(ambiguous)) and (yield from source.take(self.opens)):
            key = yield from self._key(source)
            yield name, f"{begun}{normal(key)}: "
            begun = ", "
            ends = (self.between + self.opens, *follows)
            named = self._closed_by(key)
            yield from named._value(source, name, properties.get(key), schema, [text for text in ends if text.strip()])
            yield from source.take(self.between)
        if any(text.strip() for text in follows):
            yield from source.followed(follows)
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
        closes = self.string[1] if self.string[1].strip() else self.other[1]
        is_text = kinds_of(schema, root) == ["string"]
        if self.quoted[0] and (yield from source.take(self.quoted[0])):
            is_text, closes = "string" in kinds_of(schema, root), self.quoted[1] + closes
        begin = sent = source.at
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
        if KEY not in self.string[1]:
            return self
        middle, closes = self.string
        named = middle, closes.replace(KEY, key)
        return attrs.evolve(self, string=named, other=named, nested=closes)

    def _typed(self, text: str, schema: Any, root: Mapping[str, Any]) -> Any:
        kinds = kinds_of(schema, root)
        if self.nested and ("string" not in kinds or len(kinds) == len(TYPES)):
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
            found.append((key, self._typed(source.text[source.at : end], part_of(schema, key, root), root)))
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
        return " ".join(pairs if needed else ['"\\n"?', *pairs])

    def _joined(self, rules: Rules, given: Mapping[str, Any], needed: Sequence[str], root: Mapping[str, Any]) -> str:
        comma, first, after = expression(rules, self.between), "", ""
        for name in list(given)[::-1]:
            pair = rules.add("pair", self._written(rules, literal(name), given[name], root))
            begins, follows = f"{pair} {after}", f"{comma} {pair} {after}"
            if name not in needed:
                begins, follows = (f"{begins} | {first}" if first else f"({begins})?"), f"({comma} {pair})? {after}"
            first, after = rules.add("first", begins), rules.add("more", follows)
        return first

    def _written(self, rules: Rules, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        kinds = kinds_of(schema, root)
        alternatives = []
        given = schema if isinstance(schema, Mapping) else {}
        constants = given.get("enum", [given["const"]] if "const" in given else None)
        middle, closes = self.string
        if isinstance(constants, Sequence) and constants and all(isinstance(each, str) for each in constants):
            either = " | ".join(literal(each) if each else '""' for each in constants)
            alternatives = [f"{expression(rules, middle)} ({either}) {expression(rules, closes)}"]
        elif "string" in kinds:
            alternatives = [f"{expression(rules, middle)} {rules.until(closes)}"]
            if self.quoted[0]:
                quoted = f"{literal(self.quoted[0])} {rules.until(self.quoted[1])} {expression(rules, closes)}"
                alternatives.append(f"{expression(rules, middle)} {quoted}")
        others = [kind for kind in kinds if kind != "string"]
        if others and not (alternatives and self.string == self.other):
            middle, closes = self.other
            given = {"type": others[0] if len(others) == 1 else others} if "string" in kinds else schema
            if self.nested and {"array", "object"} & set(others):
                nested = f"{expression(rules, middle)} {rules.until(closes, nested=True)}"
                return f"{expression(rules, self.opens)} {key} {nested}"
            value = self.values.value(rules, given, root)
            alternatives.append(f"{expression(rules, middle)} {value} {expression(rules, closes)}")
        return f"{expression(rules, self.opens)} {key} ({' | '.join(alternatives)})"


@functools.lru_cache(maxsize=512)
def _middle(text: str) -> re.Pattern[str]:
    """Pattern of the text between a key and a value.

    White space after it is the value's, but for a line's end.
    """
    tail = text[len(text.rstrip()) :]
    words = r"\s*".join(re.escape(word).replace(re.escape(ID), r"[\w.:-]*") for word in text.split())
    return re.compile(rf"\s*{words}" + (r"\n?" if "\n" in tail else ""))


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


def _written_value(value: Any) -> str:
    """JSON of an argument; a string where JSON cannot express it."""
    try:
        return normal(value)
    except ValueError:
        return normal(str(value))

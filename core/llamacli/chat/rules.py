"""Grammar rules of replies, in llguidance's Lark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamacli.tokenizer import Tokenizer

JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""White space in JSON: little, because some models write it endlessly."""
CALL_SPACE = "[ \n]?"
"""White space in the JSON of tool calls."""


class Rules:
    """Grammar rules for the tokens of a vocabulary, by name."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._rules: dict[str, str] = {}

    def add(self, name: str, rule: str, attributes: str = "") -> str:
        """Add a rule; its name, numbered if there is one already."""
        return self.define(self.reserve(name), rule, attributes)

    def reserve(self, name: str) -> str:
        """Name for a rule that is defined later."""
        n = 0
        while (found := f"{name}_{n}" if n else name) in self._rules:
            n += 1
        self._rules[found] = ""
        return found

    def define(self, name: str, rule: str, attributes: str = "") -> str:
        """Define a rule whose name was reserved; the name."""
        self._rules[name] = f"{name}{attributes}: {rule}"
        return name

    def marker(self, text: str) -> str:
        """Expression of a marker: special tokens, and text between them.

        Special tokens that match text, as user-defined ones do, are text.
        """
        silent = [token for token in self.tokenizer.special_ids if not self.tokenizer.piece_bytes(token)]
        parts = self.tokenizer.split(text, silent)
        return " ".join(literal(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)

    def until(self, closes: str, *, nested: bool = False) -> str:
        """Name of a rule for text up to and including a marker.

        With `nested` other markers that begin with the same special token may come before it.
        """
        marker = self.marker(closes)
        if "<[" not in marker:
            return self.add("rest", r"/(.|\n)*/", f"[suffix={marker}]")
        marker = marker[marker.index("<[") :]  # text before a special token is part of the rest
        if "ANY" not in self._rules:
            self.add("ANY", r"/(.|\n)*/")
        special, _, text = marker.partition("]>")
        if not nested or not text.strip():
            return self.add("rest", f"ANY {marker}")
        other = self.add("OTHER", rf"/(.|\n)*/ & ~({text} /(.|\n)*/)")
        return self.add("rest", f"ANY ({special}]> {other})* {marker}")

    def json(self, name: str, schema: dict[str, Any] | bool, space: str = JSON_SPACE) -> str:
        """Name of a rule for JSON valid under a schema.

        Raises InvalidRequestError for a schema that is nested too deeply.
        """
        from llamacli.sampling.schemas import close_objects, expect_depth  # which imports Numba

        expect_depth(schema)
        options = {"whitespace_pattern": space, "coerce_one_of": True}
        given = {} if schema is True else {"not": {}} if schema is False else close_objects(schema)
        return self.add(name, f"%json {json.dumps({**given, 'x-guidance': options})}")

    def grammar(self, start: str) -> str:
        """Grammar of all rules that begins with an expression."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules.values(), ""])


def literal(text: str) -> str:
    """Expression of a text."""
    return json.dumps(text, ensure_ascii=False)

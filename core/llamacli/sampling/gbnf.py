"""GBNF, llama.cpp's notation for grammars, translated to llguidance's Lark.

In GBNF a grammar is one of characters. The engine reads text by lexemes, the longest that fits, which is another thing
where one can begin with another. So every character becomes a lexeme of its own: of those none begins with another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from llamacli.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9-]+")
_NUMBER = re.compile(r"[0-9]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n?|\n")
_TOKEN_ID = re.compile(r"<\[([0-9]+)\]>")
_TOKEN_TEXT = re.compile(r"<[^>]*>")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_ANY = "/[\\x{0}-\\x{10FFFF}]/"
_MOST_REPETITIONS = 2000

TokenId = Callable[[str], int | None]


def gbnf_to_lark(text: str, token_id: TokenId = lambda _: None) -> str:
    """The same grammar for llguidance; `token_id` gives the id of a special token that it names.

    Raises InvalidRequestError that says line, column and reason.
    """
    return _Translator(text, token_id).translate()


class _Translator:
    """A recursive-descent parser that writes as it reads; `at` is where it is."""

    def __init__(self, text: str, token_id: TokenId):
        self.text, self.token_id, self.at = text, token_id, 0
        self.names: dict[str, str] = {"root": "start"}
        self.first_use: dict[str, int] = {}
        self.rules: dict[str, str] = {}

    def translate(self) -> str:
        self.match(_SPACE)
        while self.at < len(self.text):
            self.rule()
        for name, place in self.first_use.items():
            if name not in self.rules:
                self.fail(f"there is no rule {name!r}", place)
        if "root" not in self.rules:
            self.fail("there is no rule 'root'")
        return "\n".join(f"{self.names[name]}: {body}" for name, body in self.rules.items())

    def rule(self) -> None:
        name = self.match(_NAME) or self.fail("expected the name of a rule")
        self.match(_BLANKS)
        if not self.take("::="):
            self.fail("expected ::=")
        self.match(_SPACE)
        self.rules[name] = self.alternatives(_BLANKS)
        self.names.setdefault(name, f"r{len(self.names)}")
        if self.at < len(self.text) and not self.match(_NEWLINE):
            self.fail("expected an item, | or the end of the line")
        self.match(_SPACE)

    def alternatives(self, space: re.Pattern[str]) -> str:
        found = [self.sequence(space)]
        while self.take("|"):
            self.match(_SPACE)
            found.append(self.sequence(space))
        return " | ".join(found)

    def sequence(self, space: re.Pattern[str]) -> str:
        items: list[str] = []
        while (item := self.item()) is not None:
            self.match(space)
            while (times := self.repetition(space)) is not None:
                item = f"({item}){times}"
            items.append(item)
        return " ".join(items) or '""'

    def item(self) -> str | None:
        start = self.at
        if self.take('"'):
            return self.literal(start)
        if self.take("["):
            return self.characters(start)
        if self.take("."):
            return _ANY
        if self.take("("):
            self.match(_SPACE)
            inner = self.alternatives(_SPACE)
            if not self.take(")"):
                self.fail(f"expected an item, | or ) for the ( in {self.place(start)}")
            return f"({inner})"
        if self.peek("<") or self.peek("!"):
            return self.token()
        name = self.match(_NAME)
        if name is None:
            return None
        self.first_use.setdefault(name, start)
        return self.names.setdefault(name, f"r{len(self.names)}")

    def literal(self, start: int) -> str:
        found = []
        while not self.take('"'):
            found.append(f"/[{self.character(start)}]/")
        return f"({' '.join(found)})" if found else '""'

    def characters(self, start: int) -> str:
        inverse = "^" if self.take("^") else ""
        found = []
        while not self.take("]"):
            low = self.character(start)
            if self.peek("-") and not self.peek("-]"):
                place = self.at
                self.take("-")
                high = self.character(start)
                if int(high[3:-1], 16) < int(low[3:-1], 16):
                    self.fail("the range ends before it begins", place)
                low = f"{low}-{high}"
            found.append(low)
        if not found:
            self.fail("there is no character between [ and ]", start)
        return f"/[{inverse}{''.join(found)}]/"

    def character(self, start: int) -> str:
        """One character, for a regular expression; `start` is where the text or class begins that it stands in."""
        place = self.at
        if self.at == len(self.text):
            self.fail("it has no end", start)
        self.at += 1
        code = ord(self.text[place])
        if self.text[place] == "\\":
            letter = self.text[self.at : self.at + 1]
            self.at += 1
            if letter in _HEX_DIGITS:
                n = _HEX_DIGITS[letter]
                digits = self.text[self.at : self.at + n]
                if not re.fullmatch(rf"[0-9A-Fa-f]{{{n}}}", digits):
                    self.fail(f"expected {n} hexadecimal digits after \\{letter}", place)
                self.at += n
                code = int(digits, 16)
            elif letter in _ESCAPES:
                code = ord(_ESCAPES[letter])
            else:
                self.fail(f"there is no escape \\{letter}", place)
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            self.fail(f"U+{code:X} is not a character", place)
        return f"\\x{{{code:X}}}"

    def token(self) -> str:
        start = self.at
        inverse = "^" if self.take("!") else ""
        if spelled := self.match(_TOKEN_ID):
            token: int | None = int(spelled[2:-2])
        else:
            text = self.match(_TOKEN_TEXT)
            if text is None:
                self.fail("expected a token as in <text> or <[id]>", start)
            token, spelled = self.token_id(text), text
            if token is None:
                self.fail(f"the vocabulary has no token {spelled}", start)
        return f"<[{inverse}{token}]>"

    def repetition(self, space: re.Pattern[str]) -> str | None:
        start = self.at
        times = next((sign for sign in "*+?" if self.take(sign)), None)
        if times is None and self.take("{"):
            times = self.bounds(start, space)
        if times is not None:
            self.match(space)
        return times

    def bounds(self, start: int, space: re.Pattern[str]) -> str:
        self.match(space)
        low = int(self.match(_NUMBER) or self.fail("expected a number"))
        high: int | None = low
        self.match(space)
        if self.take(","):
            self.match(space)
            digits = self.match(_NUMBER)
            high = int(digits) if digits else None
            self.match(space)
        if not self.take("}"):
            self.fail("expected }")
        if high is not None and high < low:
            self.fail("at most is less than at least", start)
        if max(low, high or 0) > _MOST_REPETITIONS:
            self.fail(f"more than {_MOST_REPETITIONS} repetitions", start)
        return f"{{{low},{'' if high is None else high}}}"

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        if found:
            self.at += len(text)
        return found

    def match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def place(self, at: int) -> str:
        line = len(_NEWLINE.findall(self.text, 0, at)) + 1
        column = at - max((found.end() for found in _NEWLINE.finditer(self.text, 0, at)), default=0) + 1
        return f"line {line}, column {column}"

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        raise InvalidRequestError(f"grammar: {self.place(self.at if at is None else at)}: {reason}")

"""Parser of GBNF, llama.cpp's grammar notation, into syntax trees."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import attrs

from llamacli.errors import InvalidRequestError

LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

_NAME = re.compile(r"[A-Za-z0-9-]+")
_NUMBER = re.compile(r"[0-9]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n?|\n")
_TOKEN_ID = re.compile(r"<\[([0-9]+)\]>")
_TOKEN_TEXT = re.compile(r"<[^>]*>")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_MAX_REPETITIONS = 1_000_000
_MAX_DEPTH = 50
_MAX_RULES = 2000
_MAX_ITEMS = 100_000
MAX_SHORTEST = 1 << 16
"""Bytes of the longest text that a grammar may force: llguidance writes out a text that has no alternative."""
_SATURATED = 1 << 62
_MAX_TRIED = 256
"""Characters of a range that are looked for in the vocabulary."""

TokenId = Callable[[str], int | None]


@attrs.frozen(eq=False)
class Node:
    """Node of a grammar; compared by identity."""


@attrs.frozen(eq=False)
class Chars(Node):
    """Character class: inclusive ranges of code points."""

    ranges: tuple[tuple[int, int], ...]


@attrs.frozen(eq=False)
class Token(Node):
    """Token of the vocabulary, or any other one if `inverse`."""

    id: int
    inverse: bool


@attrs.frozen(eq=False)
class Ref(Node):
    """Reference to a rule by its name."""

    name: str


@attrs.frozen(eq=False)
class Sequence(Node):
    """Concatenation of nodes; without any, the empty text."""

    items: tuple[Node, ...]


@attrs.frozen(eq=False)
class Choice(Node):
    """Alternatives."""

    items: tuple[Node, ...]


@attrs.frozen(eq=False)
class Repeat(Node):
    """Repetition from `low` to `high` times; None is unlimited."""

    item: Node
    low: int
    high: int | None


Rules = Mapping[str, Node]


def parse_gbnf(text: str, token_id: TokenId = lambda _: None, unspelled: frozenset[int] = frozenset()) -> Rules:
    """Parse rules by name, `root` among them.

    `token_id` gives the id of a special token that the grammar names, or None; `unspelled` are bytes that no token of
    the vocabulary has. Raises InvalidRequestError with line, column and reason, also if no text can be spelled.
    """
    return _Parser(text, token_id, unspelled).parse()


class _Parser:
    def __init__(self, text: str, token_id: TokenId, unspelled: frozenset[int]):
        self.text, self.token_id, self.at, self.depth, self.n_items = text, token_id, 0, 0, 0
        self.unspelled = unspelled
        self.rule_at: dict[str, int] = {}
        self.first_use: dict[str, int] = {}
        self.rules: dict[str, Node] = {}

    def parse(self) -> Rules:
        self.match(_SPACE)
        while self.at < len(self.text):
            self.rule()
        for name, place in self.first_use.items():
            if name not in self.rules:
                self.fail(f"rule {name!r} is not defined", place)
        if "root" not in self.rules:
            self.fail("rule 'root' is not defined")
        lengths = _shortest_texts(self.rules)
        if self.rules["root"] not in lengths:
            self.fail("no text matches rule 'root': all its alternatives lead back to themselves", self.rule_at["root"])
        if self.unspelled and self.rules["root"] not in _shortest_texts(self.rules, self.unspelled):
            self.fail("every text of rule 'root' has a character without a token", self.rule_at["root"])
        longest = next((node for node, length in lengths.items() if length > MAX_SHORTEST), None)
        if longest is not None:
            name = next(name for name, node in self.rules.items() if any(part is longest for part in walk(node)))
            self.fail(f"a part of rule {name!r} has no text of at most {MAX_SHORTEST} bytes", self.rule_at[name])
        return self.rules

    def rule(self) -> None:
        start = self.at
        name = self.match(_NAME) or self.fail("expected the name of a rule")
        self.rule_at[name] = start
        self.match(_BLANKS)
        if not self.take("::="):
            self.fail("expected ::=")
        self.match(_SPACE)
        if len(self.rules) >= _MAX_RULES:
            self.fail(f"more than {_MAX_RULES} rules", start)  # the time of what follows grows with their square
        self.rules[name] = self.alternatives(_BLANKS)
        if self.at < len(self.text) and not self.match(_NEWLINE):
            self.fail("expected an item, | or the end of the line")
        self.match(_SPACE)

    def alternatives(self, space: re.Pattern[str]) -> Node:
        found = [self.sequence(space)]
        while self.take("|"):
            self.match(_SPACE)
            found.append(self.sequence(space))
        return found[0] if len(found) == 1 else Choice(tuple(found))

    def sequence(self, space: re.Pattern[str]) -> Node:
        items: list[Node] = []
        while (item := self.item()) is not None:
            self.match(space)
            depth, start = self.depth, self.at
            while (times := self.repetition(space)) is not None:
                self.deeper(1, start)
                item = Repeat(item, *times)
            self.depth = depth
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def item(self) -> Node | None:
        start = self.at
        self.count(start)
        if self.take('"'):
            return self.literal(start)
        if self.take("["):
            return self.characters(start)
        if self.take("."):
            return Chars(((0, LAST_CHARACTER),))
        if self.take("("):
            self.deeper(1, start)
            self.match(_SPACE)
            inner = self.alternatives(_SPACE)
            if not self.take(")"):
                self.fail(f"expected an item, | or ) for the ( in {self.place(start)}")
            self.deeper(-1, start)
            return inner
        if self.peek("<") or self.peek("!"):
            return self.token()
        name = self.match(_NAME)
        if name is None:
            return None
        self.first_use.setdefault(name, start)
        return Ref(name)

    def literal(self, start: int) -> Node:
        found = []
        while not self.take('"'):
            code = self.character(start)
            found.append(Chars(((code, code),)))
        return Sequence(tuple(found))

    def characters(self, start: int) -> Node:
        inverse = self.take("^")
        ranges = []
        while not self.take("]"):
            low = high = self.character(start)
            if self.peek("-") and not self.peek("-]"):
                place = self.at
                self.take("-")
                high = self.character(start)
                if high < low:
                    self.fail("the range is reversed", place)
            ranges.append((low, high))
        if not ranges:
            self.fail("empty character class", start)
        chars = Chars(_others(ranges) if inverse else tuple(ranges))
        if not chars.ranges:
            self.fail("the negated class matches no character", start)
        return chars

    def character(self, start: int) -> int:
        place = self.at
        self.count(place)
        if self.at == len(self.text):
            self.fail("unterminated string or character class", start)
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
                self.fail(f"unknown escape \\{letter}", place)
        if _SURROGATES[0] <= code <= _SURROGATES[1] or code > LAST_CHARACTER:
            self.fail(f"U+{code:X} is not a character", place)
        return code

    def token(self) -> Node:
        start = self.at
        inverse = self.take("!")
        if spelled := self.match(_TOKEN_ID):
            return Token(int(spelled[2:-2]), inverse)
        text = self.match(_TOKEN_TEXT)
        if text is None:
            self.fail("expected a token as in <text> or <[id]>", start)
        token = self.token_id(text)
        if token is None:
            self.fail(f"the vocabulary has no token {text}", start)
        return Token(token, inverse)

    def repetition(self, space: re.Pattern[str]) -> tuple[int, int | None] | None:
        start = self.at
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        times = next((times for sign, times in signs.items() if self.take(sign)), None)
        if times is None and self.take("{"):
            times = self.bounds(start, space)
        self.match(space)
        return times

    def bounds(self, start: int, space: re.Pattern[str]) -> tuple[int, int | None]:
        self.match(space)
        low = self.number(start)
        high: int | None = low
        self.match(space)
        if self.take(","):
            self.match(space)
            high = None if self.peek("}") else self.number(start)
            self.match(space)
        if not self.take("}"):
            self.fail("expected }")
        if high is not None and high < low:
            self.fail("the maximum is less than the minimum", start)
        return low, high

    def number(self, start: int) -> int:
        digits = self.match(_NUMBER) or self.fail("expected a number")
        if len(digits) > len(str(_MAX_REPETITIONS)) or int(digits) > _MAX_REPETITIONS:
            self.fail(f"more than {_MAX_REPETITIONS} repetitions", start)
        return int(digits)

    def count(self, at: int) -> None:
        self.n_items += 1
        if self.n_items > _MAX_ITEMS:
            self.fail(f"more than {_MAX_ITEMS} items and characters", at)

    def deeper(self, by: int, at: int) -> None:
        self.depth += by
        if self.depth > _MAX_DEPTH:
            self.fail(f"nested more than {_MAX_DEPTH} deep", at)

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


def walk(node: Node) -> Iterator[Node]:
    """A node and its descendants, without the rules it names."""
    yield node
    match node:
        case Sequence(items) | Choice(items):
            for item in items:
                yield from walk(item)
        case Repeat(item, _, _):
            yield from walk(item)


def _shortest_texts(rules: Rules, unspelled: frozenset[int] = frozenset()) -> dict[Node, int]:
    """Bytes of the shortest text of each node, in ascending order.

    Nodes that no text matches have none, nor nodes of which each text has a byte of `unspelled`.

    Nodes are reached in the order of their lengths, as in Dijkstra's algorithm (Knuth 1977): the first item of a choice
    is the shortest, and a sequence is reached with its last item.
    """
    parents: dict[Node, list[Node]] = {}
    missing: dict[Node, int] = {}
    total: dict[Node, int] = {}
    found: dict[Node, int] = {}
    waiting: list[tuple[int, int, Node]] = []
    numbers = itertools.count()
    for node in itertools.chain.from_iterable(map(walk, rules.values())):
        match node:
            case Chars(ranges) if _is_spelled(ranges, unspelled):
                found[node] = len(chr(min(low for low, _ in ranges)).encode())
            case Token():
                found[node] = 1
            case Sequence(()) | Repeat(_, 0, _):
                found[node] = 0
            case Sequence(items) | Choice(items):
                missing[node], total[node] = len(items), 0
                for item in items:
                    parents.setdefault(item, []).append(node)
            case Repeat(item, _, _):
                parents.setdefault(item, []).append(node)
            case Ref(name):
                parents.setdefault(rules[name], []).append(node)

    def reach_parents(node: Node, length: int) -> None:
        for parent in parents.get(node, ()):
            reached = length
            if isinstance(parent, Sequence):
                missing[parent], total[parent] = missing[parent] - 1, total[parent] + length
                if missing[parent]:
                    continue
                reached = total[parent]
            elif isinstance(parent, Repeat):
                reached = length * parent.low
            heapq.heappush(waiting, (min(reached, _SATURATED), next(numbers), parent))

    for node, length in list(found.items()):
        reach_parents(node, length)
    while waiting:
        length, _, node = heapq.heappop(waiting)
        if node not in found:
            found[node] = length
            reach_parents(node, length)
    return found


def _is_spelled(ranges: tuple[tuple[int, int], ...], unspelled: frozenset[int]) -> bool:
    """Test for a character without the bytes `unspelled`.

    True for ranges that are too long to try.
    """
    return not unspelled or any(
        high - low > _MAX_TRIED or any(unspelled.isdisjoint(chr(code).encode()) for code in range(low, high + 1))
        for low, high in ranges
    )


def _others(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, start = [], 0
    for low, high in sorted([*ranges, _SURROGATES, (LAST_CHARACTER + 1, LAST_CHARACTER + 1)]):
        if start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return tuple(found)

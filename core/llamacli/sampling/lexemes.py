"""Translation of character grammars to lexemes of llguidance's Lark.

The engine reads text by lexemes, each the longest match: it does not try a shorter one where the rest then does not
match. With every character a lexeme of its own this makes no difference, since no character begins with another; but
then each of a hundred thousand tokens is parsed character by character. So regular parts of the grammar become lexemes
where the longest match is the only possible one: where, once a lexeme is complete, no character that may come after it
also continues it, or another lexeme with the same beginning. All pairs are tested, and those that conflict are split.
"""

from __future__ import annotations

import bisect
import functools
import time
from collections.abc import Collection, Container, Iterable, Mapping

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.sampling.automata import Automaton, automaton, clash
from llamacli.sampling.gbnf import Chars, Choice, Node, Ref, Repeat, Rules, Sequence, Token, walk
from llamacli.util.cancellation import is_cancelled

_MAX_CHARACTERS = 2000
"""Largest number of characters of a lexeme, repetitions expanded."""
_MAX_SECONDS = 20
"""Seconds of CPU time for a translation: a server's thread must not be busy for hours with one grammar."""


@attrs.frozen(eq=False)
class Lexeme(Node):
    """Regular part of the grammar that is one lexeme."""

    node: Node


def to_lark(rules: Rules, ends: Collection[int] = ()) -> str:
    """Translate GBNF rules to llguidance's Lark.

    The tokens `ends`, which end generation, are no "other token": they may come where the text is complete only.
    """
    return _Translator(rules, ends).translate()


class _Translator:
    """Sets of characters are bit masks, as in `automata`."""

    def __init__(self, rules: Rules, ends: Collection[int]):
        self.rules, self.ends = rules, ends
        self.deadline = time.thread_time() + _MAX_SECONDS
        chars = (part for node in rules.values() for part in walk(node) if isinstance(part, Chars))
        self.starts = sorted({edge for part in chars for low, high in part.ranges for edge in (low, high + 1)})
        self.nullable_rules = _nullable_rules(rules)
        self.reach = _reach(rules)
        self.apart: set[Node] = set()
        self.made: dict[object, Node] = {}
        self.automata: dict[Node, Automaton | None] = {}
        self.sizes: dict[Node, int] = {}

    def translate(self) -> str:
        while True:
            marked = self.mark_rules()
            clashing = self.clashing(self.follow(marked))
            if not clashing:
                names = {name: f"r{i}" for i, name in enumerate(marked)} | {"root": "start"}
                return "\n".join(f"{names[name]}: {self.spell(node, names)}" for name, node in marked.items())
            self.apart |= clashing

    def check_time(self) -> None:
        """Raise InvalidRequestError when the time is up, or nobody waits any more."""
        if time.thread_time() > self.deadline:
            raise InvalidRequestError(f"grammar: its rules take more than {_MAX_SECONDS} s of CPU time to compare")
        if is_cancelled():
            raise InvalidRequestError("grammar: compiling it was cancelled")

    # Selection of lexemes.

    def mark_rules(self) -> dict[str, Node]:
        marked: dict[str, Node] = {}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name not in marked:
                marked[name] = self.mark(self.rules[name])
                waiting += [node.name for node in walk(marked[name]) if isinstance(node, Ref)]
        return marked

    def mark(self, node: Node) -> Node:
        if self.may_be_lexeme(node):
            return self.make(Lexeme, node)
        match node:
            case Sequence(items):
                return Sequence(tuple(self.mark_items(node, items)))
            case Choice(items):
                return Choice(tuple(map(self.mark, items)))
            case Repeat(item, 0, high) if high != 0 and self.may_be_lexeme(some := self.make(Repeat, item, 1, high)):
                return Choice((self.make(Lexeme, some), Sequence(())))
            case Repeat(item, low, high):
                return Repeat(self.mark(item), low, high)
        return node

    def mark_items(self, node: Node, items: tuple[Node, ...]) -> Iterable[Node]:
        """Join neighbours that are regular, unless the whole sequence is."""
        runs: list[list[Node]] = []
        for item in items:
            if runs and not self.is_regular(node) and self.is_regular(item) and self.is_regular(runs[-1][-1]):
                runs[-1].append(item)
            else:
                runs.append([item])
        for run in runs:
            together = run[0] if len(run) == 1 else self.make(Sequence, tuple(run))
            yield from [self.mark(together)] if self.may_be_lexeme(together) else map(self.mark, run)

    def may_be_lexeme(self, node: Node) -> bool:
        return (
            node not in self.apart
            and self.is_regular(node)
            and not self.nullable(node)
            and self.automaton(node) is not None
        )

    def is_regular(self, node: Node) -> bool:
        """Test for a part without recursion and tokens, of limited size."""
        return self.size(node) <= _MAX_CHARACTERS

    def size(self, node: Node) -> int:
        """Number of characters with repetitions expanded; above the limit if not regular."""
        if node not in self.sizes:
            match node:
                case Chars():
                    size = 1
                case Sequence(items) | Choice(items):
                    size = max(1, sum(map(self.size, items)))
                case Repeat(item, low, high):
                    size = self.size(item) * max(1, low, high or 0)
                case Ref(name) if name not in self.reach[name]:
                    size = self.size(self.rules[name])
                case _:
                    size = _MAX_CHARACTERS + 1
            self.sizes[node] = min(size, _MAX_CHARACTERS + 1)
        return self.sizes[node]

    def make(self, kind: type[Node], *fields: object) -> Node:
        key = (kind, *fields)
        if key not in self.made:
            self.made[key] = kind(*fields)
        return self.made[key]

    # First and follow sets.

    def chars(self, node: Chars) -> int:
        bits = 0
        for low, high in node.ranges:
            first, end = bisect.bisect_left(self.starts, low), bisect.bisect_left(self.starts, high + 1)
            bits |= (1 << end) - (1 << first)
        return bits

    def nullable(self, node: Node) -> bool:
        return _nullable(node, self.nullable_rules)

    def first(self, node: Node, of_rules: Mapping[str, int]) -> int:
        match node:
            case Lexeme():
                return self.read_as_one(node).continuing[0]
            case Ref(name):
                return of_rules[name]
            case Repeat(item, _, _):
                return self.first(item, of_rules)
            case Choice(items):
                return functools.reduce(int.__or__, (self.first(item, of_rules) for item in items), 0)
            case Sequence(items):
                found = 0
                for item in items:
                    found |= self.first(item, of_rules)
                    if not self.nullable(item):
                        break
                return found
        return 0

    def follow(self, marked: Mapping[str, Node]) -> dict[Lexeme, int]:
        """By lexeme, the characters that can come after it."""
        first = dict.fromkeys(marked, 0)
        while (now := {name: self.first(node, first) for name, node in marked.items()}) != first:
            first = now
            self.check_time()
        after_rule, after_lexeme = dict.fromkeys(marked, 0), dict[Lexeme, int]()

        def visit(node: Node, after: int) -> None:
            match node:
                case Lexeme():
                    after_lexeme[node] = after_lexeme.get(node, 0) | after
                case Ref(name):
                    after_rule[name] |= after
                case Repeat(item, _, high):
                    visit(item, after | (self.first(item, first) if high != 1 else 0))
                case Choice(items):
                    for item in items:
                        visit(item, after)
                case Sequence(items):
                    for item in reversed(items):
                        visit(item, after)
                        after = self.first(item, first) | (after if self.nullable(item) else 0)

        before: dict[str, int] = {}
        while before != after_rule:
            before = dict(after_rule)
            self.check_time()
            for name, node in marked.items():
                visit(node, after_rule[name])
        return after_lexeme

    def automaton(self, node: Node) -> Automaton | None:
        if node not in self.automata:
            self.automata[node] = automaton(node, self.rules, self.chars)
        return self.automata[node]

    def read_as_one(self, lexeme: Lexeme) -> Automaton:
        found = self.automaton(lexeme.node)
        assert found is not None
        return found

    def clashing(self, after: Mapping[Lexeme, int]) -> set[Node]:
        """Parts that, as lexemes, could match beyond the end of another."""
        shorter: dict[Node | int, tuple[Automaton, int]] = {}
        for lexeme, chars in after.items():
            one = self.read_as_one(lexeme)
            # Equal character classes are one lexeme at all their places.
            key = one.continuing[0] if isinstance(lexeme.node, Chars) else lexeme.node
            shorter[key] = one, chars | (shorter[key][1] if key in shorter else 0)
        longer = [lexeme for lexeme in after if not isinstance(lexeme.node, Chars)]
        found: set[Node] = set()
        for lexeme in longer:
            self.check_time()
            if any(clash(one, self.read_as_one(lexeme), chars) for one, chars in shorter.values()):
                found.add(lexeme.node)
        return found

    # Lark text.

    def spell(self, node: Node, names: Mapping[str, str]) -> str:
        match node:
            case Lexeme(inner):
                return f"/{self.regex(inner)}/"
            case Token(token, inverse):
                others = sorted({token, *self.ends})
                return f"<[^{','.join(map(str, others))}]>" if inverse else f"<[{token}]>"
            case Ref(name):
                return names[name]
            case Choice(items):
                return f"({' | '.join(self.spell(item, names) for item in items)})"
            case Repeat(item, low, high):
                return f"({self.spell(item, names)}){_bounds(low, high)}"
            case Sequence(items):
                return " ".join(self.spell(item, names) for item in items) or '""'
        raise AssertionError(node)

    def regex(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return "[" + "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in ranges) + "]"
            case Ref(name):
                return f"(?:{self.regex(self.rules[name])})"
            case Choice(items):
                return f"(?:{'|'.join(map(self.regex, items))})"
            case Repeat(item, low, high):
                return f"(?:{self.regex(item)}){_bounds(low, high)}"
            case Sequence(items):
                return "".join(map(self.regex, items))
        raise AssertionError(node)


def _bounds(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _reach(rules: Rules) -> dict[str, set[str]]:
    direct = {name: {part.name for part in walk(node) if isinstance(part, Ref)} for name, node in rules.items()}
    reach = {}
    for name in rules:
        found, waiting = set[str](), list(direct[name])
        while waiting:
            other = waiting.pop()
            if other not in found:
                found.add(other)
                waiting += direct[other]
        reach[name] = found
    return reach


def _nullable(node: Node, rules: Container[str]) -> bool:
    match node:
        case Sequence(items):
            return all(_nullable(item, rules) for item in items)
        case Choice(items):
            return any(_nullable(item, rules) for item in items)
        case Repeat(item, low, _):
            return low == 0 or _nullable(item, rules)
        case Ref(name):
            return name in rules
    return False


def _nullable_rules(rules: Rules) -> set[str]:
    found = set[str]()
    while (more := {name for name, node in rules.items() if _nullable(node, found)}) != found:
        found = more
    return found

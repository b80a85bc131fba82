"""Finite automata for the regular parts of a grammar.

Sets of characters are integers: one bit for each range of characters that no rule of the grammar distinguishes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import attrs

from llamacli.sampling.gbnf import Chars, Choice, Node, Ref, Repeat, Rules, Sequence

_MAX_STATES, _MAX_MOVES = 2000, 20_000

CharsOf = Callable[[Chars], int]
Part = tuple[set[int], set[int], bool]
"""First positions, last positions, and whether the part can be empty."""


@attrs.frozen(eq=False, slots=False)
class Automaton:
    """Deterministic finite automaton; state 0 is the start.

    `moves[state]` are pairs of a set of characters and the next state; `accepting` are flags by state.
    """

    moves: list[list[tuple[int, int]]]
    accepting: list[bool]

    @functools.cached_property
    def continuing(self) -> list[int]:
        """By state, the set of characters that can come next."""
        return [functools.reduce(int.__or__, (chars for chars, _ in moves), 0) for moves in self.moves]


def automaton(node: Node, rules: Rules, chars_of: CharsOf) -> Automaton | None:
    """Build the automaton of a part by the position construction (Glushkov 1961).

    The part must not be recursive. Returns None if there are too many states or transitions.
    """
    places = _Places(rules, chars_of)
    try:
        begins, ends, _ = places.of(node)
    except _TooManyError:
        return None
    places.follow.append(begins)
    states = {frozenset([len(places.follow) - 1]): 0}
    waiting = list(states)
    moves: list[list[tuple[int, int]]] = []
    for state in waiting:
        by_chars: dict[int, set[int]] = {}
        for place in set().union(*(places.follow[place] for place in state)):
            by_chars.setdefault(places.chars[place], set()).add(place)
        parts: list[tuple[int, frozenset[int]]] = []
        for chars, reached in by_chars.items():
            parts = list(_refined(parts, chars, reached))
        for _, target in parts:
            if target not in states:
                states[target] = len(states)
                waiting.append(target)
        if len(states) > _MAX_STATES:
            return None
        moves.append([(chars, states[target]) for chars, target in parts])
    return Automaton(moves, [not ends.isdisjoint(state) for state in waiting])


def clash(shorter: Automaton, longer: Automaton, after: int) -> bool:
    """Test if a match of `shorter` followed by `after` continues in `longer`."""
    seen, waiting = {(0, 0)}, [(0, 0)]
    while waiting:
        one, other = waiting.pop()
        for chars, next_one in shorter.moves[one]:
            for other_chars, next_other in longer.moves[other]:
                pair = next_one, next_other
                if chars & other_chars and pair not in seen:
                    if shorter.accepting[next_one] and longer.continuing[next_other] & after:
                        return True
                    seen.add(pair)
                    waiting.append(pair)
    return False


class _TooManyError(Exception):
    """Too many transitions between positions."""


class _Places:
    """Positions of a regular part, with repetitions expanded.

    `chars` is the character set of each position, `follow` the set of positions that can come next.
    """

    def __init__(self, rules: Rules, chars_of: CharsOf):
        self.rules, self.chars_of = rules, chars_of
        self.chars: list[int] = []
        self.follow: list[set[int]] = []
        self.n_moves = 0

    def of(self, node: Node) -> Part:
        """Add the positions of a part; returns where it begins and ends."""
        match node:
            case Chars():
                self.chars.append(self.chars_of(node))
                self.follow.append(set())
                place = len(self.chars) - 1
                return {place}, {place}, False
            case Ref(name):
                return self.of(self.rules[name])
            case Choice(items):
                parts = list(map(self.of, items))
                begins = set[int]().union(*(begins for begins, _, _ in parts))
                return begins, set[int]().union(*(ends for _, ends, _ in parts)), any(empty for _, _, empty in parts)
            case Sequence(items):
                return self.row(map(self.of, items))
            case Repeat(item, low, high):
                parts = [self.of(item) for _ in range(low)]
                if high is None:
                    begins, ends, _ = self.of(item)
                    self.connect(ends, begins)
                    parts.append((begins, ends, True))
                elif high > low:
                    parts.append(self.at_most(item, high - low))
                return self.row(parts)
        raise AssertionError(node)

    def row(self, parts: Iterable[Part]) -> Part:
        begins, ends, empty = set[int](), set[int](), True
        for part_begins, part_ends, part_empty in parts:
            self.connect(ends, part_begins)
            if empty:
                begins = begins | part_begins
            ends = ends | part_ends if part_empty else part_ends
            empty = empty and part_empty
        return begins, ends, empty

    def at_most(self, item: Node, times: int) -> Part:
        """Optional copies, each after the one before: linear transitions, not quadratic."""
        first, ends, _ = self.of(item)
        before = ends
        for _ in range(times - 1):
            begins, after, _ = self.of(item)
            self.connect(before, begins)
            ends, before = ends | after, after
        return first, ends, True

    def connect(self, ends: set[int], begins: set[int]) -> None:
        self.n_moves += len(ends) * len(begins)
        if self.n_moves > _MAX_MOVES:
            raise _TooManyError
        for place in ends:
            self.follow[place] |= begins


def _refined(
    parts: Iterable[tuple[int, frozenset[int]]], chars: int, reached: set[int]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Split transitions so that character sets stay disjoint, and add `reached`."""
    for others, places in parts:
        if others & chars:
            yield others & chars, places | reached
        if others & ~chars:
            yield others & ~chars, places
        chars &= ~others
    if chars:
        yield chars, frozenset(reached)

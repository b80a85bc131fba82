"""Lazy grammars, which apply after a trigger, for tool calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.sampler import Restriction


class LazyGrammar(Restriction):
    """Grammar that applies from the first of some trigger texts on.

    The grammar's text begins with the trigger itself. A trigger may be spelled by characters or by special tokens. As
    in llama.cpp (pull request 9639).

    `after` are the markers of reasoning, as for `GrammarAfter`: what opens it, "" if it is open from the beginning, and
    what ends it. Triggers within reasoning are ignored.
    """

    def __init__(self, grammar: Grammar, triggers: Sequence[str], after: Sequence[str] = ()):
        if isinstance(triggers, str) or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise InvalidRequestError(f"grammar_triggers must be non-empty strings, not {triggers!r}")
        self._grammar, self._triggers = grammar, tuple(triggers)
        self._after = tuple(after)
        self._texts = [trigger.encode() for trigger in triggers]
        self._marks = [marker.encode() for marker in after]
        self._longest = max(map(len, [*self._texts, *self._marks]))
        self._n_markers = self._n_read = 0
        """Number of the next marker of reasoning, 0 outside of it; bytes of the latest tokens before it may begin."""
        self._recent: list[tuple[int, bytes]] | None = []
        """Latest tokens and their bytes, in which a trigger may have begun; None once triggered."""

    def restrict(self, candidates: Candidates) -> None:
        """Apply the grammar's token mask once triggered."""
        if self._recent is None:
            self._grammar.restrict(candidates)

    def accept(self, token: int) -> None:
        """Advance by a token, and look for triggers.

        Raises InvalidRequestError if the grammar does not allow the token, or does not match the trigger and the rest
        of the token that it ends in.
        """
        if self._recent is None:
            self._grammar.accept(token)
            return
        recent = [*self._recent, (token, self._grammar.tokenizer.piece_bytes(token, unparse_special=True))]
        text = b"".join(piece for _, piece in recent)
        start = self._find_trigger(text)
        if start >= 0:
            try:
                self._grammar = _advanced(self._grammar, recent, start)
            except InvalidRequestError as error:
                begins = repr(text[start:].decode(errors="replace"))
                raise InvalidRequestError(
                    f"grammar_triggers: the grammar allows no text that begins with {begins}: {error}"
                ) from None
            self._recent = None
            return
        while len(text) - len(recent[0][1]) >= self._longest:
            n = len(recent.pop(0)[1])
            text, self._n_read = text[n:], max(0, self._n_read - n)
        self._recent = recent

    def _find_trigger(self, text: bytes) -> int:
        """Place of the first trigger outside of reasoning, -1 for none.

        Advances over markers of reasoning.
        """
        while True:
            starts = [start for each in self._texts if (start := text.find(each, self._n_read)) >= 0]
            trigger = min(starts, default=-1)
            if not self._marks:
                return trigger
            mark = self._marks[self._n_markers]
            at = text.find(mark, self._n_read)
            if self._n_markers == 0 and trigger >= 0 and (at < 0 or trigger < at):
                return trigger
            if at < 0:
                return -1
            self._n_read = at + len(mark)
            self._n_markers = (self._n_markers + 1) % len(self._marks)
            if self._n_markers == 0 and not self._marks[0]:
                self._marks = []  # the reasoning that the prompt has opened is over

    def reset(self) -> None:
        """Wait for a trigger again."""
        self._recent = []
        self._marks = [marker.encode() for marker in self._after]
        self._n_markers = self._n_read = 0
        self._grammar.reset()

    def clone(self) -> LazyGrammar:
        """An independent copy in the same state."""
        other = copy.copy(self)  # the lists are replaced, never changed
        other._grammar = self._grammar.clone()
        return other


def _advanced(grammar: Grammar, tokens: Sequence[tuple[int, bytes]], start: int) -> Grammar:
    """Copy of a grammar, advanced by the tokens' text from byte `start`."""
    begun, end = grammar.clone(), 0
    for token, piece in tokens:
        begin, end = end, end + len(piece)
        if begin < start < end:
            begun.accept_bytes(piece[start - begin :])
        elif start < end:
            begun.accept(token)
    return begun

"""Lazy grammars, which apply after a trigger, for tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.sampler import Sampler


class LazyGrammar(Sampler):
    """Grammar that applies from the first of some trigger texts on.

    The grammar's text begins with the trigger itself. A trigger may be spelled by characters or by special tokens. As
    in llama.cpp (pull request 9639).
    """

    def __init__(self, grammar: Grammar, triggers: Sequence[str]):
        if isinstance(triggers, str) or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise InvalidRequestError(f"grammar_triggers must be non-empty strings, not {triggers!r}")
        self._grammar, self._triggers = grammar, tuple(triggers)
        self._texts = [trigger.encode() for trigger in triggers]
        self._longest = max(map(len, self._texts))
        self._recent: list[tuple[int, bytes]] | None = []
        """Latest tokens and their bytes, in which a trigger may have begun; None once triggered."""

    def apply(self, candidates: Candidates) -> None:
        """Apply the grammar's token mask once triggered."""
        self.restrict(candidates)

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
        starts = [start for start in map(text.find, self._texts) if start >= 0]
        if starts:
            start = min(starts)
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
            text = text[len(recent.pop(0)[1]) :]
        self._recent = recent

    def reset(self) -> None:
        """Wait for a trigger again."""
        self._recent = []
        self._grammar.reset()

    def clone(self) -> LazyGrammar:
        """An independent copy in the same state."""
        other = LazyGrammar(self._grammar.clone(), self._triggers)
        other._recent = None if self._recent is None else [*self._recent]
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

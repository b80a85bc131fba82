"""Grammars that begin to hold in the middle of a text, as for a call of a tool after words of any kind."""

from __future__ import annotations

from collections.abc import Sequence

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.sampler import Sampler


class LazyGrammar(Sampler):
    """A grammar that has no say until one of some texts is written; from the beginning of that text on it holds.

    So the grammar begins with what triggers it. A trigger may be spelled by characters or by special tokens. The idea
    is llama.cpp's (pull request 9639).
    """

    def __init__(self, grammar: Grammar, triggers: Sequence[str]):
        if isinstance(triggers, str) or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise InvalidRequestError(f"grammar_triggers: {triggers!r} are not texts, or one is empty")
        self._grammar, self._triggers = grammar, tuple(triggers)
        self._texts = [trigger.encode() for trigger in triggers]
        self._longest = max(map(len, self._texts))
        self._recent: list[tuple[int, bytes]] | None = []
        """Tokens that a trigger may have begun in, and their bytes; None once it was there."""

    def apply(self, candidates: Candidates) -> None:
        """Keep what fits, if the grammar holds already."""
        self.restrict(candidates)

    def restrict(self, candidates: Candidates) -> None:
        """The same: this is what it is for."""
        if self._recent is None:
            self._grammar.restrict(candidates)

    def accept(self, token: int) -> None:
        """Go on after a token, which may end the waiting.

        Raises InvalidRequestError if the grammar does not allow it, or does not begin as the trigger and what came with
        it in the same token.
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
                self._grammar = _begun(self._grammar, recent, start)
            except InvalidRequestError as error:
                begins = repr(text[start:].decode(errors="replace"))
                raise InvalidRequestError(f"grammar_triggers: no text can begin with {begins}: {error}") from None
            self._recent = None
            return
        while len(text) - len(recent[0][1]) >= self._longest:
            text = text[len(recent.pop(0)[1]) :]
        self._recent = recent

    def reset(self) -> None:
        """Wait from the beginning."""
        self._recent = []
        self._grammar.reset()

    def clone(self) -> LazyGrammar:
        """A copy that waits, or is in the grammar, as far as this one."""
        other = LazyGrammar(self._grammar.clone(), self._triggers)
        other._recent = None if self._recent is None else [*self._recent]
        return other


def _begun(grammar: Grammar, tokens: Sequence[tuple[int, bytes]], start: int) -> Grammar:
    """A grammar, as far as the text of some tokens goes from a byte on; the first of these may be cut."""
    begun, end = grammar.clone(), 0
    for token, piece in tokens:
        begin, end = end, end + len(piece)
        if begin < start < end:
            begun.accept_bytes(piece[start - begin :])
        elif start < end:
            begun.accept(token)
    return begun

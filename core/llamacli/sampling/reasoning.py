"""Grammars that apply after a reply's reasoning, and limits of its length."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.sampler import Restriction
from llamacli.tokenizer import Tokenizer

_BLANKS = ("\n\n", "\n", " ")


class GrammarAfter(Restriction):
    """Grammar of the text after reasoning and its markers.

    - `opens`: text with which the model may open its reasoning; it is optional. "" if the prompt has opened it.
    - `closes`: texts that end the reasoning, which must come in this order, anything between them.

    Markers may be spelled by characters or by special tokens. Reasoning is free, but for tokens that end generation.
    After it one token of white space may come before the grammar's text.
    """

    def __init__(self, grammar: Grammar, opens: str, closes: Sequence[str]):
        if isinstance(closes, str) or not closes or not all(isinstance(text, str) and text for text in closes):
            raise InvalidRequestError(f"the ends of reasoning must be non-empty strings, not {closes!r}")
        self._grammar, self._opens, self._closes = grammar, opens, tuple(closes)
        tokenizer = grammar.tokenizer
        self._tokenizer = tokenizer
        self._opening = tokenizer.encode(opens, add_special=False, parse_special=True) if opens else []
        blanks = (tokenizer.encode_run(text, continues=True) for text in _BLANKS)
        self._blanks = frozenset(ids[0] for ids in blanks if len(ids) == 1)
        self._ends = np.isin(np.arange(tokenizer.n_vocab), list(tokenizer.eog_ids))
        self._is_inside, self._n_opened = not self._opening, 0
        self._besides = frozenset(self._opening[:1])
        """Tokens that may come beside those that the grammar allows."""
        self._n_closed, self._recent = 0, b""

    def restrict(self, candidates: Candidates) -> None:
        """Apply the token mask."""
        if self._is_inside:
            candidates.keep_where(~self._ends[candidates.ids])
        elif self._n_opened:
            candidates.keep_where(candidates.ids == self._opening[self._n_opened])
        elif self._besides:
            allowed = self._allowed(candidates)
            allowed[list(self._besides)] = True
            candidates.keep_where(allowed[candidates.ids])
        else:
            self._grammar.restrict(candidates)
            return
        candidates.check_drawable()

    def accept(self, token: int) -> None:
        """Advance by a token; InvalidRequestError if grammar and markers forbid it."""
        if self._is_inside:
            self._accept_reasoning(token)
        elif self._n_opened:
            if token != self._opening[self._n_opened]:
                raise InvalidRequestError(f"grammar: token {token} does not continue {self._opens!r}")
            self._accept_opening()
        else:
            is_beside, self._besides = token in self._besides, frozenset()
            if is_beside and token in self._opening[:1]:
                self._accept_opening()
                return
            try:
                self._grammar.accept(token)
            except InvalidRequestError:
                if not is_beside:
                    raise

    def reset(self) -> None:
        """Reset to the begin of the reply."""
        self._grammar.reset()
        self._is_inside, self._n_opened = not self._opening, 0
        self._besides = frozenset(self._opening[:1])
        self._n_closed, self._recent = 0, b""

    def clone(self) -> GrammarAfter:
        """An independent copy in the same state."""
        other = copy.copy(self)
        other._grammar = self._grammar.clone()
        return other

    def _allowed(self, candidates: Candidates) -> npt.NDArray[np.bool_]:
        own = Candidates(candidates.random)
        own.start(np.zeros(self._tokenizer.n_vocab, np.float32))
        allowed = np.zeros(self._tokenizer.n_vocab, np.bool_)
        self._grammar.restrict(own)
        allowed[own.ids] = True
        return allowed

    def _accept_opening(self) -> None:
        self._n_opened += 1
        if self._n_opened == len(self._opening):
            self._is_inside, self._n_opened = True, 0

    def _accept_reasoning(self, token: int) -> None:
        """Look for the ends of reasoning; start the grammar after the last."""
        self._recent += self._tokenizer.piece_bytes(token, unparse_special=True)
        while self._n_closed < len(self._closes):
            wanted = self._closes[self._n_closed].encode()
            at = self._recent.find(wanted)
            if at < 0:
                self._recent = self._recent[-len(wanted) :]
                return
            self._recent = self._recent[at + len(wanted) :]
            self._n_closed += 1
        rest, self._recent = self._recent.lstrip(), b""
        self._is_inside = False
        self._besides = frozenset() if rest else self._blanks
        if rest:
            self._grammar.accept_bytes(rest)


class ReasoningBudget(Restriction):
    """Limit of the tokens of reasoning, after which its end is forced.

    - `opens`: text that begins reasoning, "" if the prompt has. `closes`: text that ends it.
    - `budget`: number of tokens between them, of all reasoning together. `message`: text before the forced end.

    Markers may be spelled by characters or by special tokens. A character that has begun is completed first. As
    llama.cpp's `--reasoning-budget`.
    """

    def __init__(self, tokenizer: Tokenizer, opens: str, closes: str, budget: int, message: str):
        self._tokenizer, self._opens, self._closes, self._budget = tokenizer, opens.encode(), closes.encode(), budget
        self._forced = tokenizer.encode_run(message, continues=True) if message else []
        self._forced += tokenizer.encode(closes, add_special=False, parse_special=True)
        self._n_left, self._n_forced, self._recent = budget, 0, b""
        self._is_inside = not opens

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> ReasoningBudget | None:
        """Sampler, None without budget or markers; InvalidRequestError without a tokenizer."""
        if params.reasoning_budget < 0 or not params.reasoning_markers:
            return None
        if tokenizer is None:
            raise InvalidRequestError("a reasoning budget needs a tokenizer")
        opens, closes, *_ = (*params.reasoning_markers, "")
        if not closes:
            raise InvalidRequestError(f"reasoning_markers must be two texts, not {params.reasoning_markers!r}")
        return cls(tokenizer, opens, closes, params.reasoning_budget, params.reasoning_budget_message)

    def restrict(self, candidates: Candidates) -> None:
        """Keep the next token of the forced text alone."""
        if self._is_inside and self._n_left <= 0 and self._is_complete:
            candidates.keep_where(candidates.ids == self._forced[self._n_forced])
            candidates.check_drawable()

    def accept(self, token: int) -> None:
        """Count a token of reasoning, and look for the markers."""
        if self._is_inside and self._n_left <= 0 and self._is_complete:
            self._n_forced += 1
            if self._n_forced == len(self._forced):
                self._turn(inside=False)
            return
        self._recent += self._tokenizer.piece_bytes(token, unparse_special=True)
        wanted = self._closes if self._is_inside else self._opens
        self._n_left -= self._is_inside
        if wanted and wanted in self._recent:
            self._turn(inside=not self._is_inside)
        else:
            self._recent = self._recent[-max(len(wanted), _LONGEST_CHARACTER) :]

    def end(self) -> None:
        """Leave no budget: reasoning ends with the next token, between two draws."""
        self._n_left = min(self._n_left, 0)

    def reset(self) -> None:
        """Reset to the begin of the reply."""
        self._n_left, self._n_forced, self._recent = self._budget, 0, b""
        self._is_inside = not self._opens

    def clone(self) -> ReasoningBudget:
        """An independent copy in the same state."""
        return copy.copy(self)

    @property
    def _is_complete(self) -> bool:
        """True if the latest text does not end within a character."""
        lead = next((n for n in range(1, _LONGEST_CHARACTER) if self._recent[-n:][:1] >= b"\xc0"), 0)
        return not lead or len(self._recent[-lead:]) >= _n_bytes(self._recent[-lead])

    def _turn(self, *, inside: bool) -> None:
        self._is_inside, self._n_forced, self._recent = inside, 0, b""


def _n_bytes(lead: int) -> int:
    return 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2


_LONGEST_CHARACTER = 4

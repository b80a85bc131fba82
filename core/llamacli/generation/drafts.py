"""Controller of speculative decoding: sequences to draft, and lengths."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from llamacli.generation.costs import StepCost
from llamacli.generation.drafting import Drafter
from llamacli.kv import N_BATCH

_log = logging.getLogger(__name__)

_FIRST_CHANCE = 0.7
"""Probability that a drafted token comes, before any has."""
_FIRST_LENGTH = 4
"""Maximum length of the first draft, before which steps of one size only have been timed."""
_KEPT, _KEPT_WAITING = 0.95, 0.98
"""Share of the past that counts after another draft, and after a step without one."""
_NEWEST = 0.2
"""Weight of the newest time in the mean of the time that drafting takes."""
_KEPT_SECONDS = 0.99
"""Share of that mean that is left after a step, so that what was too slow is tried again."""
_CHEAP = 0.02
"""Share of a step's time below which drafting is not thought about before."""


@attrs.define(eq=False)
class Draft:
    """Drafts of a sequence.

    - `drafter`: proposes them; `max_tokens`: their maximum length.
    - `tokens`: the draft of this step; `n_accepted`: the number of its first tokens that came.
    - `n_drafted_in_all`, `n_accepted_in_all`: the same of all drafts that were settled.
    - `is_warm`: true after the first draft, for which a draft model has to evaluate the prompt.
    """

    drafter: Drafter
    max_tokens: int
    tokens: Sequence[int] = ()
    n_accepted: int = 0
    n_drafted_in_all: int = 0
    n_accepted_in_all: int = 0
    is_warm: bool = False
    _came: float = 0.0
    _tried: float = 0.0

    def expected(self, n: int) -> float:
        """Tokens to expect of a draft of n tokens.

        As if each came with the same probability, if all before it did.
        """
        p = (self._came + _FIRST_CHANCE) / (self._tried + 1)
        return p * (1 - p**n) / (1 - p) if p < 1 else float(n)

    def accepts(self, token: int) -> bool:
        """True, and counted, if the draft continues with a token."""
        accepted = self.n_accepted < len(self.tokens) and self.tokens[self.n_accepted] == token
        self.n_accepted += accepted
        return accepted

    def settle(self) -> None:
        """Learn from the fate of the draft, and end it."""
        n_drafted, n_accepted = len(self.tokens), self.n_accepted
        self.n_drafted_in_all += n_drafted
        self.n_accepted_in_all += n_accepted
        self._came = _KEPT * self._came + n_accepted
        self._tried = _KEPT * self._tried + n_accepted + (n_accepted < n_drafted)
        self.tokens, self.n_accepted = (), 0

    def wait(self) -> None:
        """Decay the acceptance statistics, so that drafts are tried again later."""
        self._came, self._tried = _KEPT_WAITING * self._came, _KEPT_WAITING * self._tried


class _Drafted(Protocol):
    """Sequence whose next tokens may be drafted.

    - `tokens`: all of its tokens, the last `n_missing` of which the step evaluates.
    - `n_left`: tokens that may still be drawn.
    - `draft`: its drafts, None for none; `drop_draft` ends them after an error.
    """

    draft: Draft | None

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def n_missing(self) -> int: ...
    @property
    def n_left(self) -> int: ...
    def drop_draft(self) -> None: ...


Drafted = TypeVar("Drafted", bound=_Drafted)


class Drafts(Generic[Drafted]):
    """Controller of the drafts of running sequences.

    A sequence is drafted for as long as the tokens to expect pay for the time that the step takes longer: by the fitted
    cost of steps, the share of its drafted tokens that came, and the time of drafting. The more sequences run, the less
    that is, down to nothing.

    - `cost`: the time of steps, in seconds by rows, which the caller observes.
    - `reserve`: called with a sequence, the length of its draft and the bytes reserved so far in the step; returns the
      bytes reserved with the draft, or None if there is no memory for it.
    """

    def __init__(
        self,
        cost: StepCost,
        reserve: Callable[[Drafted, int, int], int | None] = lambda sequence, n, reserved: reserved,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.cost, self._reserve, self._clock, self._seconds = cost, reserve, clock, 0.0

    def propose(self, sequences: Sequence[Drafted], step_s: float = 0.0, reserved: int = 0) -> None:
        """Draft for the sequences of a step.

        Each of them gets a token in it. A step may take `step_s` seconds, 0 for no limit; `reserved` bytes of memory
        are for its other tokens.
        """
        n_rows, expected, drafting_s = sum(one.n_missing for one in sequences), float(len(sequences)), 0.0
        self._seconds *= _KEPT_SECONDS
        for sequence in sequences:
            draft = sequence.draft
            if draft is None:
                continue
            draft.tokens, draft.n_accepted = (), 0
            limit = min(draft.max_tokens, sequence.n_left - 1, N_BATCH - n_rows)
            is_cheap = limit * self._seconds < _CHEAP * self.cost.seconds(n_rows)
            if not is_cheap:
                limit = self._best_length(draft, limit, n_rows, expected, step_s, drafting_s)
            tokens = self._drafted(sequence, draft, limit) if limit > 0 else ()
            n = len(tokens)
            if n and is_cheap:
                n = self._best_length(draft, n, n_rows, expected, step_s, drafting_s)
            after = self._reserve(sequence, n, reserved) if n else None
            if after is None:
                draft.wait()
                continue
            draft.tokens, reserved = tokens[:n], after
            n_rows, expected, drafting_s = n_rows + n, expected + draft.expected(n), drafting_s + n * self._seconds

    def _best_length(
        self, draft: Draft, limit: int, n_rows: int, expected: float, step_s: float, drafting_s: float
    ) -> int:
        """Length of the draft that gives most tokens a second."""
        usual = self.cost.likely_seconds(n_rows)
        if not usual:
            return min(limit, _FIRST_LENGTH) if self.cost.per_row else 0
        best, best_rate = 0, expected / max(1e-9, usual + drafting_s)
        n = 1
        while n <= limit:
            seconds = self.cost.likely_seconds(n_rows + n)
            if step_s and seconds > step_s:
                break
            rate = (expected + draft.expected(n)) / max(1e-9, seconds + drafting_s + n * self._seconds)
            if rate > best_rate:
                best, best_rate = n, rate
            n = limit if n < limit < 4 * n else 4 * n
        return best

    def _drafted(self, sequence: Drafted, draft: Draft, limit: int) -> Sequence[int]:
        started = self._clock()
        try:
            tokens = draft.drafter.draft(sequence.tokens, limit)
        except Exception as error:  # of memory for a draft model, or of a drafter of a plugin
            _log.warning("no more drafts for %s", sequence, exc_info=error)
            sequence.drop_draft()
            return ()
        tokens = list(itertools.takewhile(lambda token: token >= 0, tokens))  # other inputs cannot be drafted
        if tokens and draft.is_warm:
            self._seconds += _NEWEST * ((self._clock() - started) / len(tokens) - self._seconds)
        draft.is_warm = True
        return tokens[:limit]

"""Controller of speculative decoding: sequences to draft, and lengths."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from llamacli.generation.costs import StepCost
from llamacli.generation.drafting import Draft
from llamacli.generation.stream import TokenSequence
from llamacli.kv import N_BATCH

_log = logging.getLogger(__name__)

_FIRST_LENGTH = 4
"""Maximum length of the first draft, before which steps of one size only have been timed."""
_NEWEST = 0.2
"""Weight of the newest time in the mean of the time that drafting takes."""
_KEPT_SECONDS = 0.99
"""Share of that mean that is left after a step, so that what was too slow is tried again."""
_CHEAP = 0.02
"""Share of a step's time below which drafting is not thought about before."""


Drafted = TypeVar("Drafted", bound=TokenSequence)


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
            draft.n_drafted_in_all += n
            n_rows, expected, drafting_s = n_rows + n, expected + draft.expected(n), drafting_s + n * self._seconds

    def _best_length(
        self, draft: Draft, limit: int, n_rows: int, expected: float, step_s: float, drafting_s: float
    ) -> int:
        """Length of the draft that gives most tokens a second."""
        usual = self.cost.likely_seconds(n_rows)
        if not usual:  # of steps of other sizes nothing is known: as if rows were free
            usual, limit = self.cost.seconds(n_rows), min(limit, _FIRST_LENGTH)
        if not usual:
            return 0
        best, best_rate = 0, expected / max(1e-9, usual + drafting_s)
        n = 1
        while n <= limit:
            seconds = self.cost.likely_seconds(n_rows + n) or usual
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
            tokens = draft.drafter.draft(sequence.context, limit)
        except Exception as error:  # of memory for a draft model, or of a drafter of a plugin
            _log.warning("no more drafts for %s", sequence, exc_info=error)
            sequence.drop_draft()
            return ()
        taken = self._clock() - started
        tokens = list(itertools.takewhile(lambda token: token >= 0, tokens))  # other inputs cannot be drafted
        if draft.is_warm:
            self._seconds += _NEWEST * (taken / max(1, len(tokens)) - self._seconds)
        if not tokens and taken > _CHEAP * self.cost.seconds(1):
            draft.fail()
        draft.is_warm = True
        return tokens[:limit]

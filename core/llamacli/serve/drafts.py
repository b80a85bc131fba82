"""Drafts of running texts: speculative decoding in steps that many texts share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import attrs

from llamacli.drafting import Drafter
from llamacli.engine.compiled_model import CompiledModel
from llamacli.kv import N_BATCH, KVPool
from llamacli.serve.cache import CacheMemory
from llamacli.serve.costs import StepCost
from llamacli.serve.lanes import Lane, LaneDraft
from llamacli.serve.metrics import Counters

_log = logging.getLogger(__name__)

_NEWEST = 0.2
"""Weight of the newest time in the mean of the time that drafting takes."""
_KEPT = 0.99
"""Share of that mean that is left after a step, so that what was too slow is tried again."""
_CHEAP = 0.02
"""Share of a step's time below which drafting is not thought about before."""


@attrs.frozen
class DraftSource:
    """Maker of drafters, one for each text.

    - `create`: drafter of drafts of at most so many tokens.
    - `max_tokens`: maximum length of a draft where a request names none.
    - `reads_prompts`: true if the drafters take the hidden states of prompts too.
    - `pool`: where their caches are, None for drafters without.
    """

    create: Callable[[int], Drafter]
    max_tokens: int
    reads_prompts: bool = False
    pool: KVPool | None = None


class Drafts:
    """Drafts of the texts of a scheduler.

    A text is drafted for as long as the tokens to expect pay for the time that the step takes longer: by the fitted
    cost of steps, the share of its drafts that came, and the time of drafting. The more texts run, the less that is,
    down to nothing. Drafts use memory that is free or holds prefixes; no text is preempted for them.
    """

    def __init__(
        self,
        source: DraftSource | None,
        model: CompiledModel,
        memory: CacheMemory,
        cost: StepCost,
        counters: Counters,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._source, self._model, self._memory, self._clock = source, model, memory, clock
        self._cost, self._counters, self._seconds = cost, counters, 0.0

    def begin_prompt(self, lane: Lane) -> None:
        """Prepare the text after a prompt, where the drafter reads the prompt."""
        if self._source is not None and self._source.reads_prompts:
            self.begin(lane)

    def begin(self, lane: Lane) -> None:
        """Prepare a text that begins, with its request's limit."""
        generation = lane.job.generation
        if self._source is None or generation is None or lane.draft is not None:
            return
        n = self._source.max_tokens if generation.draft_max is None else generation.draft_max
        if not n:
            return
        try:
            drafter = self._source.create(n)
            drafter.begin(self._model)
        except Exception as error:  # of memory for the drafter
            _log.warning("no drafts for the request %s", lane.ticket.request.id, exc_info=error)
        else:
            lane.draft = LaneDraft(drafter, n)

    def propose(self, lanes: Sequence[Lane], step_s: float, reserved: int) -> None:
        """Draft for the lanes of a step.

        Each has one token to evaluate, and those that it evaluates again. A step may take `step_s` seconds, 0 for no
        limit; `reserved` bytes are for its other tokens.
        """
        n_rows, expected, drafting_s = sum(lane.n_missing for lane in lanes), float(len(lanes)), 0.0
        self._seconds *= _KEPT
        for lane in lanes:
            draft = lane.draft
            if draft is None:
                continue
            draft.tokens, draft.n_accepted = (), 0
            limit = min(draft.max_tokens, lane.n_left - 1, N_BATCH - n_rows)
            is_cheap = limit * self._seconds < _CHEAP * self._cost.seconds(n_rows)
            if not is_cheap:
                limit = self._best_length(draft, limit, n_rows, expected, step_s, drafting_s)
            tokens = self._drafted(lane, draft, limit) if limit > 0 else ()
            n = len(tokens)
            if n and is_cheap:
                n = self._best_length(draft, n, n_rows, expected, step_s, drafting_s)
            m = lane.n_missing
            more = lane.sequence.bytes_to_reserve(m + n) - lane.sequence.bytes_to_reserve(m) if n else 0
            if not n or not self._memory.spare(reserved + more):
                draft.wait()
                continue
            draft.tokens, reserved = tokens[:n], reserved + more
            n_rows, expected, drafting_s = n_rows + n, expected + draft.expected(n), drafting_s + n * self._seconds

    def settle(self, lane: Lane) -> None:
        """Drop what was evaluated of a draft and did not come.

        Recurrent states drop the whole draft.
        """
        draft = lane.draft
        if draft is None or not draft.tokens:
            return
        n_drafted, n_accepted = len(draft.tokens), draft.n_accepted
        n = len(lane.sequence.tokens) - n_drafted + n_accepted
        lane.sequence.truncate(lane.sequence.floor(n))
        lane.n_again = n - len(lane.sequence.tokens)
        draft.settle()
        lane.ticket.n_drafted += n_drafted
        lane.ticket.n_accepted += n_accepted
        self._counters.draft_tokens += n_drafted
        self._counters.draft_tokens_accepted += n_accepted

    def _best_length(
        self, draft: LaneDraft, limit: int, n_rows: int, expected: float, step_s: float, drafting_s: float
    ) -> int:
        """Length of the draft that gives most tokens a second."""
        best, best_rate = 0, expected / max(1e-9, self._cost.likely_seconds(n_rows) + drafting_s)
        n = 1
        while n <= limit:
            seconds = self._cost.likely_seconds(n_rows + n)
            if step_s and seconds > step_s:
                break
            rate = (expected + draft.expected(n)) / max(1e-9, seconds + drafting_s + n * self._seconds)
            if rate > best_rate:
                best, best_rate = n, rate
            n = limit if n < limit < 4 * n else 4 * n
        return best

    def _drafted(self, lane: Lane, draft: LaneDraft, limit: int) -> Sequence[int]:
        started = self._clock()
        try:
            tokens = draft.drafter.draft(lane.tokens, limit)
        except Exception as error:  # of memory for a draft model, or of a drafter of a plugin
            _log.warning("no more drafts for the request %s", lane.ticket.request.id, exc_info=error)
            lane.drop_draft()
            return ()
        if tokens and draft.is_warm:
            self._seconds += _NEWEST * ((self._clock() - started) / len(tokens) - self._seconds)
        draft.is_warm = True
        return tokens[:limit]

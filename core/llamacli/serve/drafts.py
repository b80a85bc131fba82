"""Drafters of running sequences, and the memory of drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import attrs

from llamacli.engine.compiled_model import CompiledModel
from llamacli.generation.costs import StepCost
from llamacli.generation.drafters import PredictedText
from llamacli.generation.drafting import Draft, Drafter
from llamacli.generation.drafts import Drafts
from llamacli.kv import KVPool
from llamacli.serve.cache import CacheMemory
from llamacli.serve.sequences import SequenceState

_log = logging.getLogger(__name__)


@attrs.frozen
class DraftSource:
    """Maker of drafters, one for each text.

    - `create`: drafter of drafts of at most so many tokens.
    - `reads_prompts`: true if the drafters take the hidden states of prompts too.
    - `pool`: where their caches are, None for drafters without.
    """

    create: Callable[[int], Drafter]
    reads_prompts: bool = False
    pool: KVPool | None = None


class ServedDrafts(Drafts[SequenceState]):
    """Controller of the drafts of a scheduler's sequences.

    They use memory that is free or holds prefixes; no sequence is preempted for them. `max_tokens` is the maximum
    length of a draft where a request names none.
    """

    def __init__(
        self,
        source: DraftSource | None,
        max_tokens: int,
        model: CompiledModel,
        memory: CacheMemory,
        cost: StepCost,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(cost, self._spare, clock)
        self._source, self._max_tokens, self._model, self._memory = source, max_tokens, model, memory

    def begin(self, sequence: SequenceState) -> None:
        """Prepare the drafts of a text.

        Drafters that read prompts begin with the prompt, others behind it. A predicted text alone drafts its request.
        """
        generation, source = sequence.request.generation, self._source
        if generation is not None and generation.prediction:
            source = DraftSource(partial(PredictedText, (sequence.prompt[-1], *generation.prediction)))
        if source is None or generation is None or sequence.draft is not None:
            return
        if sequence.text is None and not source.reads_prompts:
            return
        if generation.contents is not None and source.pool is not None and not source.reads_prompts:
            return  # a draft model reads ids only
        n = self._max_tokens if generation.draft_max is None else generation.draft_max
        if not n:
            return
        try:
            drafter = source.create(n)
            drafter.begin(self._model)
        except Exception as error:  # of memory for the drafter
            _log.warning("no drafts for the request %s", sequence.request.message.id, exc_info=error)
        else:
            sequence.draft = Draft(drafter, n)

    def _spare(self, sequence: SequenceState, n: int, reserved: int) -> int | None:
        """Free memory for a draft of n tokens beside the bytes reserved.

        Returns the bytes reserved then, None if that is impossible.
        """
        m = sequence.n_missing
        reserved += sequence.cache.bytes_to_reserve(m + n) - sequence.cache.bytes_to_reserve(m)
        return reserved if self._memory.spare(reserved) else None

"""Planning of steps: decode tokens, and chunked prefill in turn."""

from __future__ import annotations

from concurrent.futures import Future

from llamacli.engine.compiled_model import CompiledModel
from llamacli.generation.costs import MIN_CHUNK, StepCost, chunk_rows
from llamacli.kv import N_BATCH
from llamacli.kv.prefixes import n_common
from llamacli.serve.cache import CacheMemory
from llamacli.serve.drafts import ServedDrafts
from llamacli.serve.lifecycle import Lifecycle
from llamacli.serve.pictures import ServedPictures
from llamacli.serve.running import Running
from llamacli.serve.sampling_pool import SLOW_DRAW_S
from llamacli.serve.sequences import SequenceState
from llamacli.serve.settings import EngineSettings

EXTRA_SHARE = 0.5
"""Share of a step's time that its sequences may take where more run than `max_running`."""
LAST_CHUNK = 1.15
"""Share of a step's time that it may take if that ends the first prompt, whose next token would wait for another."""
OLDEST_EVERY = 4
"""Of so many steps with prompts, one begins with the oldest."""

BACKGROUND_SHARE = 0.13
"""Share of the time of a step that background sequences may add to it."""

_ROW_BYTES = 64 << 20
"""Bytes of logits of a chunk of a prompt whose log-probabilities are wanted."""
_NEWEST = 0.1
"""Weight of the newest step in the mean of the time that steps spend outside of evaluation."""


class Planner:
    """Planner of the steps of one model.

    A step evaluates one token of every sequence that decodes and, in the time that is left, chunks of prompts.

    - `running`: sequences of the model. `n_steps`: steps so far that evaluated something.
    - `waiting`: prompts for which a picture is encoded in this step, in turn; `picture_s`: seconds for that, 0 for no
      limit. `reads`: reads of prefixes that prompts wait for.
    """

    def __init__(
        self,
        model: CompiledModel,
        settings: EngineSettings,
        memory: CacheMemory,
        running: Running,
        cost: StepCost,
        drafts: ServedDrafts,
        lifecycle: Lifecycle,
        pictures: ServedPictures,
    ):
        self._model, self._settings, self._memory, self.running = model, settings, memory, running
        self._cost, self._drafts, self._lifecycle, self._pictures = cost, drafts, lifecycle, pictures
        self.waiting: list[SequenceState] = []
        self.reads: list[Future[int]] = []
        self.picture_s = 0.0
        self._is_encoder, self._has_encoder = model.program.needs_whole_input, model.program.has_encoder
        self._other_s = self._credit_s = 0.0
        self._n_prompt_steps = self.n_steps = 0
        self._is_shared = False

    @property
    def capacity(self) -> int:
        """Sequences that may run at once.

        Above `max_running` so many that a step of them leaves enough of its time for prompts.
        """
        settings = self._settings
        fewest, most = settings.max_running, settings.max_running + settings.extra_running
        if not settings.step_ms or most == fewest:
            return most
        if self._cost.per_row <= 0:
            return fewest  # nothing is known of the model's time
        return max(fewest, min(most, self._cost.rows_within(EXTRA_SHARE * settings.step_ms / 1000)))

    def observe(self, seconds: float) -> None:
        """Count a step that spent so many seconds outside of evaluation."""
        self.n_steps += 1
        self._other_s += _NEWEST * (seconds - self._other_s)

    def plan(self) -> list[tuple[SequenceState, int]]:
        """Sequences of the next step, and how many tokens of each.

        There are free pages for these. Where prompts wait for a picture, every second step encodes it instead of
        evaluating prompts, if there are others.
        """
        plan: list[tuple[SequenceState, int]] = []
        need = 0
        decoding = [one for one in self.running.sequences if one.decodes and one.n_missing and not one.drawing]
        allowed = self._background_rows(sum(one.n_missing for one in decoding if not one.background))
        for sequence in decoding:
            n = sequence.n_missing
            if sequence.background and n > allowed:
                continue
            more = sequence.cache.bytes_to_reserve(n) if sequence in self.running.sequences else 0
            if sequence in self.running.sequences and self.running.make_room(sequence, need + more):
                plan.append((sequence, n))
                need += more
                if self._is_shared and sequence.background:
                    allowed -= self._spend(n)
        n_decoding, n_decode, step_ms = len(plan), sum(n for _, n in plan), self._settings.step_ms
        step_s = max(1e-6, step_ms / 1000 - self._other_s) if step_ms else 0.0  # for evaluation; 0 for no limit
        in_turn, self.reads = self._prompts_in_turn(), []
        if in_turn and self._memory.reads:
            in_turn = self._without_reads(in_turn)
        self.waiting = [sequence for sequence in in_turn if sequence.n_missing and not self._pictures.room(sequence)]
        prompts = [sequence for sequence in in_turn if sequence not in self.waiting]
        if self.waiting and prompts and self.n_steps % 2:
            prompts = []
        elif prompts:
            self.waiting = []
        self.picture_s = max(1e-6, step_s - self._cost.seconds(n_decode)) if step_s else 0.0
        if plan and not prompts:
            sequences = [sequence for sequence, _ in plan if sequence in self.running.sequences]
            quick = [sequence for sequence in sequences if sequence.draw_s <= SLOW_DRAW_S]
            if allowed < N_BATCH:
                quick = [sequence for sequence in quick if not sequence.background]
            self._drafts.propose(quick, step_s, need)
            return [(sequence, sequence.n_missing + sequence.n_drafted) for sequence in sequences]
        n_adapted = len({bool(sequence.adapters) for sequence in [*(sequence for sequence, _ in plan), *prompts[:1]]})
        passes = max(1, n_adapted) + bool(prompts and prompts[0].embeds)
        passes += bool(plan and prompts and prompts[0].has_ways)
        room = chunk_rows(self._cost, n_decode, step_s, passes=passes)
        longest = chunk_rows(self._cost, n_decode, LAST_CHUNK * step_s, passes=passes)
        if n_decode and step_s and self._cost.seconds(n_decode) > step_s and self.n_steps % 2:
            room = 0  # generation alone takes too long: prompts go on in every second step
        for sequence in prompts:
            if not room:
                break
            gives_way = sequence.background and allowed < N_BATCH
            if gives_way and not allowed:
                continue
            if sequence not in self.running.sequences or sequence.kind != prompts[0].kind:
                continue
            if not sequence.wants_rows:
                gained = self._memory.reuse(sequence.cache, sequence.cell_keys)
                self._lifecycle.count_cached(sequence, gained)
            alone = self._has_encoder or (self._is_encoder and not plan)
            if sequence is prompts[0] and not gives_way and (sequence.n_missing <= longest or alone):
                room = max(room, sequence.n_missing)  # an encoder's input is evaluated whole, if need be alone
            most = MIN_CHUNK if n_decode and sequence.wants_rows and not sequence.embeds else room
            most = min(most, self._pictures.room(sequence), allowed if gives_way else most)
            is_first = sequence is prompts[0] and not gives_way
            n, more = self._chunk(sequence, min(room, most), need, is_first=is_first)
            if n:
                if self._is_shared and sequence.background:
                    allowed -= self._spend(n)
                plan.append((sequence, n))
                need, room = need + more, room - n
        self._n_prompt_steps += len(plan) > n_decoding
        return [(sequence, n) for sequence, n in plan if sequence in self.running.sequences]

    def _without_reads(self, prompts: list[SequenceState]) -> list[SequenceState]:
        """Prompts whose prefix is not being read from disk.

        `reads` are those of the others.
        """
        new = [one for one in prompts if not one.cache.tokens]
        reads = {one: read for one in new if (read := self._memory.read_of(one.prompt, self._cost.per_row))}
        self.reads = [*reads.values()]
        return [one for one in prompts if one not in reads]

    def _background_rows(self, n_rows: int) -> int:
        """Rows that background sequences may have beside n rows of others.

        A step that would grow by more than its share saves the time for a later one. No limit while no other runs.
        """
        self._is_shared = any(not one.background for one in self.running.sequences)
        if not self._is_shared:
            return 2 * N_BATCH
        per_row = self._cost.per_row
        if per_row <= 0:
            return 1
        alone = self._cost.seconds(n_rows) if n_rows else self._settings.step_ms / 1000
        share = BACKGROUND_SHARE * alone
        self._credit_s = min(self._credit_s + share, max(share, per_row))
        return min(N_BATCH - 1, int(self._credit_s / per_row + 1e-9))

    def _spend(self, n: int) -> int:
        self._credit_s -= n * max(0.0, self._cost.per_row)
        return n

    def _prompts_in_turn(self) -> list[SequenceState]:
        """Sequences with prompts, or other tokens before their next draw, in turn.

        The one with the fewest missing tokens first, for the shortest waits; every fourth step begins with the oldest,
        so that none starves. A prompt waits while an older one computes tokens that both begin with.
        """
        sequences = [one for one in self.running.sequences if not (one.decodes or one.drawing)]
        if self._memory.shares_anywhere:
            sequences = [
                sequence
                for i, sequence in enumerate(sequences)
                if not any(_leads(other, sequence) for other in sequences[:i])
            ]
        oldest = sequences[:1] if self._n_prompt_steps % OLDEST_EVERY == OLDEST_EVERY - 1 else []
        return sorted(sequences, key=lambda one: (one not in oldest, one.background, one.n_missing, one.order))

    def _chunk(self, sequence: SequenceState, room: int, reserved: int, *, is_first: bool) -> tuple[int, int]:
        """Tokens of a prompt's next chunk, and the bytes of its pages.

        As many as fit into the `room` of the step and, beside the bytes `reserved`, into memory. Spans are not cut:
        one that is longer than the room is evaluated whole if its prompt `is_first`.
        """
        n = _without_cut(sequence, min(room, sequence.n_missing), is_first=is_first)
        is_whole = self._is_encoder or self._has_encoder
        if is_whole and n < sequence.n_missing:
            return 0, 0
        if sequence.wants_rows and not sequence.embeds:
            n = min(n, max(1, _ROW_BYTES // (4 * self._model.config.n_vocab)))
        while n:
            more = sequence.cache.bytes_to_reserve(n)
            if self.running.make_room(sequence, reserved + more):
                return n, more
            n = 0 if is_whole else _without_cut(sequence, n // 2, is_first=False)
        return 0, 0


def _without_cut(sequence: SequenceState, n: int, *, is_first: bool) -> int:
    """Number of tokens, about n, that cut no span."""
    contents = sequence.request.message.contents
    if contents is None:
        return n
    start = len(sequence.cache.tokens)
    span = contents.span_at(sequence.context, start + n)
    if span is None:
        return n
    return span[0] - start if span[0] > start else span[1] - start if is_first else 0


def _leads(other: SequenceState, sequence: SequenceState) -> bool:
    """True if another prompt computes next what a sequence could share afterwards."""
    if other.kind != sequence.kind or other.adapters != sequence.adapters:
        return False
    if sequence.wants_rows or not other.n_missing:
        return False
    common = min(n_common(other.cell_keys, sequence.cell_keys), len(sequence.context) - 1)
    return len(other.cache.tokens) < common and len(sequence.cache.tokens) < common

"""Planning of steps: tokens of texts, and pieces of prompts in turn."""

from __future__ import annotations

from llamacli.engine.compiled_model import CompiledModel
from llamacli.generation.costs import MIN_CHUNK, StepCost, chunk_rows
from llamacli.kv.prefixes import n_common
from llamacli.serve.cache import CacheMemory
from llamacli.serve.drafts import ServedDrafts
from llamacli.serve.lanes import Lane
from llamacli.serve.lifecycle import Lifecycle
from llamacli.serve.running import Running
from llamacli.serve.settings import EngineSettings

QUANTUM = 512
"""Tokens of prompts after which another prompt has its turn."""
EXTRA_SHARE = 0.5
"""Share of a step's time that its texts may take where more run than `max_running`."""
LAST_PIECE = 1.15
"""Share of a step's time that it may take if that ends the first prompt, whose next token would wait for another."""
OLDEST_EVERY = 4
"""Of so many pieces of prompts, one goes to the oldest."""

_ROW_BYTES = 64 << 20
"""Bytes of logits of a piece of a prompt whose log-probabilities are wanted."""
_NEWEST = 0.1
"""Weight of the newest step in the mean of the time that steps spend outside of evaluation."""


class Planner:
    """Planner of the steps of one model.

    A step evaluates one token of every text that is being generated and, in the time that is left, pieces of prompts.

    - `running`: lanes of the model. `n_steps`: steps planned so far that evaluate something.
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
    ):
        self._model, self._settings, self._memory, self.running = model, settings, memory, running
        self._cost, self._drafts, self._lifecycle = cost, drafts, lifecycle
        self._other_s = 0.0
        self._n_pieces = self.n_steps = 0

    def plan(self) -> list[tuple[Lane, int]]:
        """Lanes of the next step, and how many tokens of each.

        There are free pages for these.
        """
        found = self._lanes()
        self.n_steps += bool(found)
        return found

    @property
    def n_places(self) -> int:
        """Texts that may run at once.

        Above `max_running` so many that a step of them leaves enough of its time for prompts.
        """
        settings = self._settings
        fewest, most = settings.max_running, settings.max_running + settings.extra_running
        if not settings.step_ms or most == fewest:
            return most
        if self._cost.per_row <= 0:
            return fewest  # nothing is known of the model's time
        return max(fewest, min(most, self._cost.rows_within(EXTRA_SHARE * settings.step_ms / 1000)))

    def observe_other(self, seconds: float) -> None:
        """Learn the time that a step has spent outside of evaluation."""
        self._other_s += _NEWEST * (seconds - self._other_s)

    def _lanes(self) -> list[tuple[Lane, int]]:
        plan: list[tuple[Lane, int]] = []
        need = 0
        for lane in [lane for lane in self.running.lanes if lane.state == "decode" and lane.n_missing]:
            n = lane.n_missing
            more = lane.sequence.bytes_to_reserve(n) if lane in self.running.lanes else 0
            if lane in self.running.lanes and self.running.make_room(lane, need + more):
                plan.append((lane, n))
                need += more
        n_decode, step_s = sum(n for _, n in plan), self._step_s
        prompts = self._prompts_in_turn()
        if plan and not prompts:
            lanes = [lane for lane, _ in plan if lane in self.running.lanes]
            self._drafts.controller.propose(lanes, step_s, need)
            return [(lane, lane.n_missing + lane.n_drafted) for lane in lanes]
        n_adapted = len({lane.job.adapters for lane in [*(lane for lane, _ in plan), *prompts[:1]]})
        passes = max(1, n_adapted) + bool(prompts and prompts[0].embeds)
        room = chunk_rows(self._cost, n_decode, step_s, passes=passes)
        longest = chunk_rows(self._cost, n_decode, LAST_PIECE * step_s, passes=passes)
        if n_decode and step_s and self._cost.seconds(n_decode) > step_s and self.n_steps % 2:
            room = 0  # generation alone takes too long: prompts go on in every second step
        for lane in prompts:
            if not room:
                break
            if lane not in self.running.lanes or lane.kind != prompts[0].kind:
                continue
            if not lane.wants_rows:
                gained = self._memory.reuse(lane.sequence, lane.tokens)
                self._lifecycle.count_cached(lane, gained)
            if lane is prompts[0] and lane.n_missing <= longest:
                room = max(room, lane.n_missing)
            most = MIN_CHUNK if n_decode and lane.wants_rows and not lane.embeds else room
            n, more = self._piece(lane, min(room, most), need)
            if n:
                plan.append((lane, n))
                need, room = need + more, room - n
                self._n_pieces += 1
        return [(lane, n) for lane, n in plan if lane in self.running.lanes]

    @property
    def _step_s(self) -> float:
        """Seconds that a step may spend in evaluation; 0 for no limit."""
        if not self._settings.step_ms:
            return 0.0
        return max(1e-6, self._settings.step_ms / 1000 - self._other_s)

    def _prompts_in_turn(self) -> list[Lane]:
        """Lanes with prompts, or other tokens before their next draw, in turn.

        The least served first, in quanta; every fourth piece goes to the oldest. A prompt waits while an older one
        computes tokens that both begin with.
        """
        lanes = [lane for lane in self.running.lanes if lane.state == "prefill"]
        if self._memory.shares_anywhere:
            lanes = [lane for i, lane in enumerate(lanes) if not any(_leads(other, lane) for other in lanes[:i])]
        oldest = lanes[:1] if self._n_pieces % OLDEST_EVERY == OLDEST_EVERY - 1 else []
        return sorted(lanes, key=lambda lane: (lane not in oldest, lane.n_served // QUANTUM, lane.order))

    def _piece(self, lane: Lane, room: int, reserved: int) -> tuple[int, int]:
        """Tokens of a prompt's next piece, and the bytes of its pages.

        As many as fit into the `room` of the step and, beside the bytes `reserved`, into memory.
        """
        n = min(room, lane.n_missing)
        is_encoder = self._model.program.needs_whole_input
        if is_encoder and n < lane.n_missing:
            return 0, 0
        if lane.wants_rows and not lane.embeds:
            n = min(n, max(1, _ROW_BYTES // (4 * self._model.config.n_vocab)))
        while n:
            more = lane.sequence.bytes_to_reserve(n)
            if self.running.make_room(lane, reserved + more):
                return n, more
            n = 0 if is_encoder else n // 2
        return 0, 0


def _leads(other: Lane, lane: Lane) -> bool:
    """True if another prompt computes next what a lane could share afterwards."""
    if other.kind != lane.kind or lane.wants_rows or not other.n_missing:
        return False
    common = min(n_common(other.tokens, lane.tokens), len(lane.tokens) - 1)
    return other.n_cached < common and lane.n_cached < common

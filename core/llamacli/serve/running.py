"""Running and preempted lanes of a scheduler, and their cache pages."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from llamacli.serve.cache import CacheMemory
from llamacli.serve.lanes import Lane
from llamacli.serve.metrics import Counters

GROWTH = 64
"""Tokens of each running text for which pages are left at admission."""
MAX_PREEMPTIONS = 3
"""Times that a text gives way to others than the oldest."""


class Running:
    """Lanes that run, and those that were preempted.

    - `lanes`, `preempted`: the oldest first. Only preempted lanes have no pages.
    """

    def __init__(self, memory: CacheMemory, counters: Counters):
        self._memory, self._counters = memory, counters
        self.lanes: list[Lane] = []
        self.preempted: list[Lane] = []

    def __iter__(self) -> Iterator[Lane]:
        """All lanes; the lists may change meanwhile."""
        return iter((*self.lanes, *self.preempted))

    def __len__(self) -> int:
        return len(self.lanes) + len(self.preempted)

    @property
    def n_slots(self) -> int:
        """Texts that run, and those that will after prompts that run."""
        return sum(1 + (lane.job.n_slots if lane.text is None else 0) for lane in self)

    def fits(self, n_tokens: int) -> bool:
        """True if there are pages for a lane of so many tokens.

        Beside those that the others will need soon.
        """
        if not self.lanes:
            return True
        memory = self._memory
        promised = sum(memory.n_bytes(lane.n_missing + min(lane.n_left, GROWTH)) for lane in self.lanes)
        return memory.n_bytes(n_tokens) + promised <= memory.free_bytes

    def enter(self, lane: Lane) -> None:
        """Add a lane."""
        bisect.insort(self.lanes, lane, key=lambda one: one.order)

    def leave(self, lane: Lane, *, keep: bool = True) -> None:
        """Remove a lane, and keep what it has computed for later prompts."""
        for lanes in (self.lanes, self.preempted):
            if lane in lanes:
                lanes.remove(lane)
        if keep and not lane.wants_rows:
            self._memory.keep(lane.sequence)
        lane.drop_draft()
        lane.sequence.close()

    def preempt(self, lane: Lane) -> None:
        """Take a lane's pages; it is evaluated again later."""
        self.lanes.remove(lane)
        lane.sequence.truncate(0)
        if lane.draft is not None:
            lane.draft.tokens = ()
        lane.logprobs.clear()
        lane.rows.clear()
        lane.n_again = 0
        lane.n_preempted += 1
        lane.ticket.n_preempted += 1
        self._counters.preemptions += 1
        bisect.insort(self.preempted, lane, key=lambda one: one.order)

    def resume(self) -> None:
        """Start preempted lanes again, as memory allows."""
        while self.preempted and self.fits(len(self.preempted[0].tokens)):
            self.enter(self.preempted.pop(0))

    def make_room(self, lane: Lane, n_bytes: int) -> bool:
        """Free pages for a lane; False if there are not enough.

        Prefixes are evicted first, then later lanes are preempted. The oldest lane can take the pages of all others, so
        that progress is certain.
        """
        while not self._memory.evict(n_bytes):
            later = [other for other in self.lanes if other.order > lane.order]
            if lane is not self.lanes[0]:
                later = [other for other in later if other.n_preempted < MAX_PREEMPTIONS]
            if not later:
                return False
            self.preempt(later[-1])
        return True

    def close(self) -> None:
        """Free the pages of all lanes."""
        for lane in self:
            lane.drop_draft()
            lane.sequence.close()
        self.lanes, self.preempted = [], []

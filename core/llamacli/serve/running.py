"""Running and preempted sequences of a scheduler, and their cache pages."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from llamacli.serve.cache import CacheMemory
from llamacli.serve.metrics import Counters
from llamacli.serve.sequences import SequenceState

GROWTH = 64
"""Tokens of each running sequence for which pages are left at admission."""
MAX_PREEMPTIONS = 3
"""Times that a sequence gives way to others than the oldest."""


class Running:
    """Sequences that run, and preempted ones.

    - `sequences`, `preempted`: the oldest first. Only preempted sequences have no pages.
    """

    def __init__(self, memory: CacheMemory, counters: Counters):
        self._memory, self._counters = memory, counters
        self.sequences: list[SequenceState] = []
        self.preempted: list[SequenceState] = []

    def __iter__(self) -> Iterator[SequenceState]:
        """All sequences; the lists may change meanwhile."""
        return iter((*self.sequences, *self.preempted))

    def __len__(self) -> int:
        return len(self.sequences) + len(self.preempted)

    @property
    def n_slots(self) -> int:
        """Slots that are taken, by choices to come after running prompts too."""
        return sum(sequence.n_slots for sequence in self)

    def slots_before(self, sequence: SequenceState) -> int:
        """Slots of the sequences that do not give way to another."""
        return sum(other.n_slots for other in self if sequence.background or not other.background)

    def yield_slots(self, n: int, capacity: int) -> None:
        """Preempt background sequences until there are n slots, or none is left."""
        while sum(other.n_slots for other in self.sequences) + n > capacity and self._yield_one():
            pass

    def yield_pages(self, n_tokens: int) -> bool:
        """Preempt background sequences until n tokens fit; False if they do not."""
        while not self.fits(n_tokens):
            if not self._yield_one():
                return False
        return True

    def _yield_one(self) -> bool:
        """Preempt the last background sequence, and keep its prefix."""
        last = self.sequences[-1] if self.sequences else None
        if last is None or not last.background:
            return False
        if not last.wants_rows:
            self._memory.keep(last.cache)
        self.preempt(last)
        return True

    def fits(self, n_tokens: int) -> bool:
        """True if there are pages for a sequence of so many tokens.

        Beside those that the others will need soon.
        """
        if not self.sequences:
            return True
        memory = self._memory
        promised = sum(memory.n_bytes(sequence.n_missing + min(sequence.n_left, GROWTH)) for sequence in self.sequences)
        return memory.n_bytes(n_tokens) + promised <= memory.free_bytes

    def enter(self, sequence: SequenceState) -> None:
        """Add a sequence."""
        bisect.insort(self.sequences, sequence, key=lambda one: one.order)

    def leave(self, sequence: SequenceState, *, keep: bool = True) -> None:
        """Remove a sequence, and keep what it has computed for later prompts."""
        for sequences in (self.sequences, self.preempted):
            if sequence in sequences:
                sequences.remove(sequence)
        if keep and not sequence.wants_rows:
            self._memory.keep(sequence.cache)
        sequence.drop_draft()
        sequence.cache.close()

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's pages; it is evaluated again later."""
        self.sequences.remove(sequence)
        sequence.cache.truncate(0)
        if sequence.draft is not None:
            sequence.draft.tokens = ()
        sequence.logprobs.clear()
        sequence.rows.clear()
        sequence.n_preempted += 1
        sequence.request.n_preempted += 1
        self._counters.preemptions += 1
        bisect.insort(self.preempted, sequence, key=lambda one: one.order)

    def resume(self, capacity: int, *, background: bool = True) -> None:
        """Start preempted sequences again, as slots and memory allow."""
        while self.preempted and self.fits(len(self.preempted[0].context)):
            n_slots = sum(other.n_slots for other in self.sequences) + self.preempted[0].n_slots
            if self.preempted[0].background and (not background or (self.sequences and n_slots > capacity)):
                return
            self.enter(self.preempted.pop(0))

    def make_room(self, sequence: SequenceState, n_bytes: int) -> bool:
        """Free pages for a sequence; False if there are not enough.

        Prefixes are evicted first, then later sequences are preempted. The oldest can take the pages of all others, so
        that progress is certain.
        """
        while not self._memory.evict(n_bytes):
            later = [other for other in self.sequences if other.order > sequence.order]
            if sequence is not self.sequences[0]:
                later = [other for other in later if other.n_preempted < MAX_PREEMPTIONS]
            if not later:
                return False
            self.preempt(later[-1])
        return True

    def close(self) -> None:
        """Free the pages of all sequences."""
        for sequence in self:
            sequence.drop_draft()
            sequence.cache.close()
        self.sequences, self.preempted = [], []

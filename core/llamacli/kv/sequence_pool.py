"""Leases of numbered sequences: whoever holds one has it for itself, and finds it empty."""

from __future__ import annotations

from llamacli.errors import InvalidRequestError
from llamacli.kv.cache import KVCache
from llamacli.util.numbers import is_integer

NO_LEASE = -1
"""What `acquire` gives when every sequence is leased."""


class Tenancy:
    """Gives out the sequences of a cache, the one that came back last first. A vacant sequence is always empty."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._vacant = list(reversed(range(cache.n_seq_max)))
        self._leased: set[int] = set()
        if any(cache.pos_max(seq) >= 0 for seq in self._vacant):
            raise InvalidRequestError("a cache is empty when its sequences begin to be leased")

    @property
    def available(self) -> int:
        """How many sequences are vacant."""
        return len(self._vacant)

    @property
    def leased(self) -> frozenset[int]:
        """The sequences that are leased."""
        return frozenset(self._leased)

    def acquire(self) -> int:
        """Lease a sequence; NO_LEASE if there is none."""
        if not self._vacant:
            return NO_LEASE
        seq = self._vacant[-1]
        self._leased |= {seq}  # no call from here on, where an interrupt could come in between
        del self._vacant[-1]
        return seq

    def release(self, seq: int) -> None:
        """Give an empty sequence back. Raises InvalidRequestError if it is not leased, or not empty."""
        self._expect(seq)
        if self.cache.pos_max(seq) >= 0:
            raise InvalidRequestError(f"sequence {seq} still holds tokens: evict it")
        self._leased -= {seq}
        self._vacant += [seq]

    def evict(self, seq: int) -> None:
        """Empty a sequence and give it back. Raises InvalidRequestError if it is not leased."""
        self._expect(seq)
        self.cache.remove_range(seq)
        self.release(seq)

    def retain(self, keep: int) -> None:
        """Evict all but one; the lowest are given out first from here on."""
        self._expect(keep)
        self.cache.seq_keep(keep)
        self._leased = {keep}
        self._vacant = [seq for seq in reversed(range(self.cache.n_seq_max)) if seq != keep]

    def evict_all(self) -> None:
        """Evict every leased sequence; the highest of them is given out first then."""
        for seq in sorted(self._leased):
            self.evict(seq)

    def _expect(self, seq: int) -> None:
        if not is_integer(seq) or seq not in self._leased:
            raise InvalidRequestError(f"sequence {seq!r} is not leased")

"""Sequence pool: exclusive leases of a cache's numbered sequences."""

from __future__ import annotations

from llamacli.errors import InvalidRequestError
from llamacli.kv.cache import KVCache
from llamacli.util.numbers import is_integer

NO_LEASE = -1
"""Return value of `acquire` when every sequence is leased."""


class SequencePool:
    """Pool of a cache's sequences; free ones are empty, latest released first."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._free = list(reversed(range(cache.n_seq_max)))
        self._leased: set[int] = set()
        if any(cache.pos_max(seq) >= 0 for seq in self._free):
            raise InvalidRequestError("the cache of a sequence pool must be empty")

    @property
    def available(self) -> int:
        """Number of free sequences."""
        return len(self._free)

    @property
    def leased(self) -> frozenset[int]:
        """Numbers of the leased sequences."""
        return frozenset(self._leased)

    def acquire(self) -> int:
        """Lease an empty sequence; its number, or NO_LEASE if none is free."""
        if not self._free:
            return NO_LEASE
        seq = self._free[-1]
        self._leased |= {seq}  # interrupt-safe, see `llamacli.kv.pool`
        del self._free[-1]
        return seq

    def release(self, seq: int) -> None:
        """Return a sequence; InvalidRequestError if it is not leased, or not empty."""
        self._check_leased(seq)
        if self.cache.pos_max(seq) >= 0:
            raise InvalidRequestError(f"sequence {seq} still holds tokens: evict it")
        self._leased -= {seq}
        self._free += [seq]

    def evict(self, seq: int) -> None:
        """Empty a sequence and return it; InvalidRequestError if it is not leased."""
        self._check_leased(seq)
        self.cache.remove_range(seq)
        self.release(seq)

    def release_all_but(self, keep: int) -> None:
        """Empty and return all sequences but one.

        Afterwards the lowest are leased first. Raises InvalidRequestError if `keep` is not leased.
        """
        self._check_leased(keep)
        self.cache.seq_keep(keep)
        self._leased = {keep}
        self._free = [seq for seq in reversed(range(self.cache.n_seq_max)) if seq != keep]

    def evict_all(self) -> None:
        """Empty and return every leased sequence; the highest is leased first then."""
        for seq in sorted(self._leased):
            self.evict(seq)

    def _check_leased(self, seq: int) -> None:
        if not is_integer(seq) or seq not in self._leased:
            raise InvalidRequestError(f"sequence {seq!r} is not leased")

"""Prefix cache: finds cached sequences that share a token prefix."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence, held_bytes
from llamacli.util.locking import locked

MAX_KEPT = 64
"""Maximum number of kept sequences: each lookup compares the prompt with all of them."""


class PrefixIndex:
    """Prefix cache over sequences of one pool, with LRU eviction.

    Only sequences of the same RoPE variant and LoRA adapters share cells. It refers weakly to the sequences of open
    sessions. It keeps copies (forks, which share pages) of the sequences of closed sessions, and of those with sliding
    windows or recurrent states at the ends of prompts. The least recently used copies are evicted, so that the pages of
    all copies stay within a size limit. With recurrent states, copies of one text at several lengths are thinned out:
    the gaps between those that stay grow with their age.
    """

    def __init__(self, pool: KVPool):
        self._pool, self.lock = pool, pool.lock
        self._live: weakref.WeakSet[KVSequence] = weakref.WeakSet()
        self._kept: list[KVSequence] = []  # the most recently used last
        self._used_at: weakref.WeakKeyDictionary[KVSequence, float] = weakref.WeakKeyDictionary()

    @locked
    def add(self, sequence: KVSequence) -> None:
        """Register a sequence for reuse while it is alive and open."""
        self._live.add(sequence)

    @locked
    def reuse(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Extend a sequence by the longest cached continuation of `tokens`.

        `sequence` must hold a prefix of `tokens`. The last token is left to be evaluated. Returns how many tokens were
        reused.
        """
        held = len(sequence.tokens)
        for source, n in self._matches(sequence, tokens):
            try:
                sequence.copy(source, held, n)
            except InvalidRequestError:  # the other's sliding window has moved past the prefix
                continue
            if source in self._kept:
                self._touch(source)
            return n - held
        return 0

    @locked
    def keep(self, sequence: KVSequence, max_bytes: int) -> None:
        """Keep a copy of a sequence; evict others beyond `max_bytes`."""
        if not sequence.tokens or held_bytes(self._pool, [sequence]) > max_bytes:
            return
        for other in filter(sequence.is_like, list(self._kept)):
            n = min(_n_shared(other, sequence.tokens), _n_shared(sequence, other.tokens))
            if n == len(sequence.tokens) and other.can_truncate(n):  # the other contains this one
                self._touch(other)
                return
            if n == len(other.tokens) and n != sequence.n_kept and sequence.can_truncate(n):
                self._evict(other)
        self._kept.append(sequence.fork())
        self._used_at[self._kept[-1]] = time.monotonic()
        while len(self._kept) > MAX_KEPT or self.n_bytes > max_bytes:
            self._evict(self._least_useful())

    @property
    def n_bytes(self) -> int:
        """Bytes of the kept copies' pages; shared pages count once."""
        return held_bytes(self._pool, self._kept)

    @property
    @locked
    def evictable_bytes(self) -> int:
        """Bytes of the pages that only kept copies hold."""
        return sum(
            pages.page_bytes * sum(pages.ref_count(page) == n for page, n in _held_pages(self._kept, g))
            for g, pages in enumerate(self._pool.groups)
        )

    @locked
    def evict_one(self) -> bool:
        """Evict the copy that is least useful; False if there are none."""
        if not self._kept:
            return False
        self._evict(self._least_useful())
        return True

    @locked
    def sequences(self) -> list[KVSequence]:
        """Cached sequences: of open sessions, then the kept ones, latest first."""
        return [*self._live, *reversed(self._kept)]

    @locked
    def longest(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Number of first `tokens` that a sequence would have after `reuse`."""
        return next((n for _, n in self._matches(sequence, tokens)), len(sequence.tokens))

    @locked
    def idle(self, seconds: float) -> list[KVSequence]:
        """Kept sequences that have not been used for so long."""
        since = time.monotonic() - seconds
        return [kept for kept in self._kept if self._used_at[kept] <= since]

    @locked
    def forget(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Evict the kept beginnings of `tokens`, a list.

        They are those that a sequence like this one could reuse.
        """
        for kept in filter(sequence.is_like, list(self._kept)):
            if kept.tokens == tokens[: len(kept.tokens)]:
                self._evict(kept)

    @locked
    def clear(self) -> None:
        """Evict all kept copies."""
        while self._kept:
            self._evict(self._kept[0])

    def _matches(self, sequence: KVSequence, tokens: Sequence[int]) -> Iterator[tuple[KVSequence, int]]:
        """Sequences with longer prefixes of `tokens` and their lengths, longest first."""
        if sequence.first_stale_cell is not None:  # its cells saw removed tokens, which cells of others did not see
            return
        held, most = len(sequence.tokens), min(len(tokens) - 1, sequence.seq_len)
        others = [other for other in (*self._live, *self._kept) if len(other.tokens) > held and sequence.is_like(other)]
        found = [(other, other.floor(min(most, _n_shared(other, tokens)))) for other in others]
        yield from sorted((match for match in found if match[1] > held), key=lambda match: -match[1])

    def _least_useful(self) -> KVSequence:
        """The copy to evict next.

        With recurrent states a copy can be used at its own length only. Evicting it costs the tokens since the next
        shorter copy of its text; the copy with the fewest, divided by its age, goes. The newest two stay.
        """
        if not self._kept[0].pool.layout.recurrent or len(self._kept) < 3:
            return self._kept[0]

        def cost(i: int) -> float:
            kept = self._kept[i]
            tokens = kept.tokens
            shorter = (other.tokens for other in self._kept if len(other.tokens) < len(tokens) and kept.is_like(other))
            base = max((len(prefix) for prefix in shorter if tokens[: len(prefix)] == prefix), default=0)
            return (len(tokens) - base) / (len(self._kept) - i)

        return self._kept[min(range(len(self._kept) - 2), key=cost)]

    def _touch(self, kept: KVSequence) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)
        self._used_at[kept] = time.monotonic()

    def _evict(self, kept: KVSequence) -> None:
        self._kept.remove(kept)
        kept.close()


def _held_pages(sequences: Sequence[KVSequence], group: int) -> Iterator[tuple[int, int]]:
    held = [sequence.held_pages(group) for sequence in sequences]
    if held:
        pages, counts = np.unique(np.concatenate(held), return_counts=True)
        yield from zip(pages.tolist(), counts.tolist(), strict=True)


def _n_shared(sequence: KVSequence, tokens: Sequence[int]) -> int:
    """Number of a sequence's cells that evaluating `tokens` would reproduce."""
    n = n_common(sequence.tokens, tokens)
    return n if sequence.first_stale_cell is None else min(n, sequence.first_stale_cell)


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences.

    Both must be of the same type, two lists or two tuples. A binary search over slices, because comparing slices is
    faster than comparing token by token.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

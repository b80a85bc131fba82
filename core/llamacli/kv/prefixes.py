"""Finding tokens that some sequence has already evaluated, so that their pages are shared instead of computed again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.util.locking import locked

MOST_KEPT = 64
"""How many closed sequences are kept at the most: all are looked through for each prompt."""


class PrefixIndex:
    """Sequences of one pool whose cells mean the same to one another.

    Those of open sessions are known as long as they live; copies of those that were closed are kept, and of those with
    sliding windows at the ends of prompts. The least recently used are given up first, so that all pages together take
    no more than the cap.
    """

    def __init__(self, pool: KVPool):
        self.lock = pool.lock
        self._live: weakref.WeakSet[KVSequence] = weakref.WeakSet()
        self._kept: list[KVSequence] = []  # the most recently used last

    @locked
    def add(self, sequence: KVSequence) -> None:
        """Share what this sequence holds as long as it lives."""
        self._live.add(sequence)

    @locked
    def reuse(self, sequence: KVSequence, tokens: Sequence[int]) -> int:
        """Let `sequence`, which holds the first of `tokens`, go on with as many as another one holds.

        The last of them is left to be evaluated. Returns how many were reused.
        """
        held = len(sequence.tokens)
        for source, n in self._matches(sequence, tokens):
            try:
                sequence.copy(source, held, n)
            except InvalidRequestError:  # a sliding window of the other has moved on
                continue
            if source in self._kept:
                self._use(source)
            return n - held
        return 0

    @locked
    def keep(self, sequence: KVSequence, max_bytes: int) -> None:
        """Remember what a sequence holds now, within so many bytes."""
        if not sequence.tokens or _n_bytes([sequence]) > max_bytes:
            return
        for other in list(self._kept):
            n = min(_n_shared(other, sequence.tokens), _n_shared(sequence, other.tokens))
            if n == len(sequence.tokens) and other.can_truncate(n):  # it is there already
                self._use(other)
                return
            if n == len(other.tokens) and sequence.can_truncate(n):
                self._drop(other)
        self._kept.append(sequence.fork())
        while len(self._kept) > MOST_KEPT or self.n_bytes > max_bytes:
            self._drop(self._kept[0])

    @property
    def n_bytes(self) -> int:
        """Bytes of the pages of what is kept; shared ones count once."""
        return _n_bytes(self._kept) if self._kept else 0

    @locked
    def clear(self) -> None:
        """Give up all that is kept."""
        while self._kept:
            self._drop(self._kept[0])

    def _matches(self, sequence: KVSequence, tokens: Sequence[int]) -> Iterator[tuple[KVSequence, int]]:
        """Sequences that hold more of `tokens` than this one does, and how many, the longest first."""
        if sequence.cut is not None:  # what others hold has not seen what was cut out here
            return
        held, most = len(sequence.tokens), min(len(tokens) - 1, sequence.seq_len)
        others = [other for other in (*self._live, *self._kept) if len(other.tokens) > held]
        found = [(other, min(most, _n_shared(other, tokens))) for other in others]
        yield from sorted((match for match in found if match[1] > held), key=lambda match: -match[1])

    def _use(self, kept: KVSequence) -> None:
        """Let this be the one that was used last."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def _drop(self, kept: KVSequence) -> None:
        self._kept.remove(kept)
        kept.close()


def _n_bytes(sequences: Sequence[KVSequence]) -> int:
    """Bytes of the pages of some sequences of one pool; shared ones count once."""
    total = 0
    for g, pages in enumerate(sequences[0].pool.groups):
        held = np.unique(np.concatenate([sequence.tables[g] for sequence in sequences]))
        total += pages.page_bytes * int(np.count_nonzero(held))
    return total


def _n_shared(sequence: KVSequence, tokens: Sequence[int]) -> int:
    """How many cells of a sequence are what evaluating `tokens` gives."""
    n = n_common(sequence.tokens, tokens)
    return n if sequence.cut is None else min(n, sequence.cut)


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike; comparing slices is faster than token by token."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""BPE over the characters of the text: SentencePiece's and ranked merges.

Both write a space as U+2581, and a character that is not a token as its UTF-8 bytes, `<0xXX>` each.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from llamacli.errors import TokenizerError
from llamacli.tokenizer.vocabulary import Vocabulary

_SPACE = "▁"
_NEWLINE_RUNS = re.compile(r"\n+|[^\n]+")

Rank = Callable[[str, str], float | None]


def merge(text: str, rank: Rank) -> Iterator[str]:
    """Merge adjacent pieces by lowest rank and yield the final pieces.

    Starts from single characters. Of pairs of equal rank the leftmost is merged first. `rank(left, right)` is None for
    pairs that do not merge. Takes O(n log n) time as long as the lengths of mergeable pairs are bounded.
    """
    n = len(text)
    end = list(range(1, n + 1))  # end of the piece that starts here; 0 once merged into another
    before = list(range(-1, n - 1))  # start of the piece before the one that starts here
    heap = []
    for i in range(n - 1):
        cost = rank(text[i], text[i + 1])
        if cost is not None:
            heap.append((cost, i, i + 1, i + 2))
    heapify(heap)

    def push(left: int, middle: int) -> None:
        stop = end[middle]
        cost = rank(text[left:middle], text[middle:stop])
        if cost is not None:
            heappush(heap, (cost, left, middle, stop))

    while heap:
        _, left, middle, stop = heappop(heap)
        if end[left] != middle or end[middle] != stop:
            continue  # stale: one of the two has merged with another
        end[left], end[middle] = stop, 0
        if stop < n:
            before[stop] = left
            push(left, stop)
        if left > 0:
            push(before[left], left)
    start = 0
    while start < n:
        yield text[start : end[start]]
        start = end[start]


class _Pieces:
    """Conversion between pieces and ids."""

    def __init__(self, vocabulary: Vocabulary):
        self._ids = vocabulary.ids
        self._unknown = vocabulary.special.get("unknown")

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""
        return text.replace(_SPACE, " ").encode()

    def _to_ids(self, pieces: Iterator[str]) -> Iterator[int]:
        for piece in pieces:
            if (token := self._ids.get(piece)) is not None:
                yield token
            else:
                yield from map(self._byte_id, piece.encode())

    def _byte_id(self, byte: int) -> int:
        token = self._ids.get(f"<0x{byte:02X}>", self._unknown)
        if token is None:
            raise TokenizerError(f"the vocabulary has neither the byte token <0x{byte:02X}> nor an unknown token")
        return token


class ScoreMerging(_Pieces):
    """SentencePiece's BPE: the merge with the highest token score comes first.

    `scores`: float32 [n_vocab]. `add_space_prefix`: put a space before a run of text.
    """

    def __init__(self, vocabulary: Vocabulary, scores: npt.NDArray[np.float32], add_space_prefix: bool):
        super().__init__(vocabulary)
        self._cost = dict(zip(vocabulary.tokens, (-scores).tolist(), strict=True))
        self.add_space_prefix = add_space_prefix

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens."""
        return list(self._to_ids(merge(text.replace(" ", _SPACE), self._rank)))

    def _rank(self, left: str, right: str) -> float | None:
        cost: float | None = self._cost.get(left + right)
        return cost


class RankMerging(_Pieces):
    """BPE with ranked merges, on lines of the text.

    A run of newlines that is a token of its own is not merged. `merges`: "left right" each, best first; parsed at the
    first encode.
    """

    add_space_prefix = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str]):
        super().__init__(vocabulary)
        self._merges = merges

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens."""
        ids: list[int] = []
        for run in _NEWLINE_RUNS.findall(text.replace(" ", _SPACE)):
            if run[0] == "\n" and run in self._ids:
                ids.append(self._ids[run])
            else:
                ids.extend(self._to_ids(merge(run, self._rank)))
        return ids

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(f"{left} {right}")

    @cached_property
    def _ranks(self) -> dict[str, int]:
        merges = list(self._merges)
        return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))  # the first duplicate counts

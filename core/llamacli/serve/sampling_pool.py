"""Draws of the next tokens of many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llamacli.serve.sequences import SequenceState
from llamacli.util.system import lower_priority

MIN_LOGITS = 1 << 18
"""Logits of a step from which threads share its draws: below, handing them over takes longer."""

SLOW_DRAW_S = 0.005
"""CPU seconds of a draw from which the next draws of a sequence run beside the steps, as with an ambiguous grammar."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class SamplingPool:
    """Thread pool that draws tokens.

    Sequences are independent, so results do not depend on the number of threads. Samplers spend most of their time in
    compiled code and NumPy, which run without Python's lock.
    """

    def __init__(self, n_threads: int = 1):
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads - 1, "llamacli-draw") if n_threads > 1 else None
        self._slow = ThreadPoolExecutor(1, "llamacli-slow-draw", lower_priority)

    def draw(self, sequences: Sequence[SequenceState], n_vocab: int) -> list[int | Exception]:
        """Draw the token of each sequence; an error takes its place."""
        return self.map(SequenceState.draw_and_accept, sequences, len(sequences) * n_vocab)

    def draw_beside(self, sequence: SequenceState) -> Future[int | Exception]:
        """Draw the token of a sequence beside the steps.

        A thread of low priority draws for one sequence after another.
        """
        return self._slow.submit(sequence.draw_and_accept)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], n_logits: int) -> list[Result]:
        """Apply a function to items, in threads if they read many logits."""
        n_parts = min(self._n_threads, len(items))
        if self._pool is None or n_parts < 2 or n_logits < MIN_LOGITS:
            return list(map(function, items))
        others = [self._pool.submit(_map, function, items[i::n_parts]) for i in range(1, n_parts)]
        parts = [_map(function, items[::n_parts]), *(other.result() for other in others)]
        return [parts[i % n_parts][i // n_parts] for i in range(len(items))]

    def close(self) -> None:
        """End the threads."""
        self._slow.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.shutdown()


def _map(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return list(map(function, items))

"""Draws of the next tokens of many sequences at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llamacli.engine.batching import Logits
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

    def draw(self, ready: Sequence[tuple[SequenceState, Logits]]) -> list[int | Exception]:
        """Draw the token of each sequence; an error takes its place.

        The first row of its logits counts. Samplers accept their tokens, but for those that end texts.
        """
        return self.map(_draw, ready, sum([logits.shape[1] for _, logits in ready]))

    def draw_beside(self, ready: tuple[SequenceState, Logits]) -> Future[int | Exception]:
        """Draw the token of a sequence beside the steps.

        A thread of low priority draws for one sequence after another.
        """
        return self._slow.submit(_draw, ready)

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


def _draw(ready: tuple[SequenceState, Logits]) -> int | Exception:
    sequence, logits = ready
    sampler, chain, text = sequence.sampler, sequence.chain, sequence.text
    assert sampler is not None
    assert chain is not None
    assert text is not None
    started = time.thread_time()
    try:
        token = sampler.draw(logits[0], chain)
        if token not in text.end_ids:
            sampler.accept(token)
    except Exception as error:
        return error
    sequence.draw_s = time.thread_time() - started
    sequence.draws_s += sequence.draw_s
    return token

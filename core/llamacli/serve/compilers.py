"""Threads that compile grammars, shared between keys."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from llamacli.util.cancellation import cancellable_by

T = TypeVar("T")
P = ParamSpec("P")

N_THREADS, MOST_PER_KEY = 4, 3
"""Threads, and how many of them one key may use: the last is for others."""


class Compilers:
    """Thread pool for grammars; one key never takes all threads.

    A thread cannot be ended from outside. What may take long asks `is_cancelled`, which is true once its client has
    left, or has its answer because the time was over.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(N_THREADS, "llamacli-grammar")
        self._shares: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def run(self, key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, within the share of a key.

        Cancelling this cancels the function's work.
        """
        share = self._shares.setdefault(key, asyncio.Semaphore(MOST_PER_KEY))
        await share.acquire()
        loop, left = asyncio.get_running_loop(), threading.Event()

        def work_of_caller() -> T:
            with cancellable_by(left):
                return function(*args, **kwargs)

        try:
            work = self._pool.submit(work_of_caller)
        except BaseException:
            share.release()
            raise

        def ended(_: Future[T]) -> None:  # the thread goes on after a caller that leaves
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(share.release)

        work.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(work)
        finally:
            left.set()

    def close(self) -> None:
        """Begin no more calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

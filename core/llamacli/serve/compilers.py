"""Threads that compile grammars, shared between keys."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from llamacli.serve.errors import BadRequestError, QueueTimeoutError
from llamacli.util.cancellation import cancellable_by

T = TypeVar("T")
P = ParamSpec("P")

SECONDS = 5.0
"""Limit of a call by default."""

N_THREADS, MOST_PER_KEY, MOST_OF_BATCHES = 5, 3, 1
"""Threads, and how many of them one key, and all batches, may use: the last is for others."""


class Compilers:
    """Thread pool for grammars; one key never takes all threads.

    `seconds` are those that a call may wait for a thread, and again those that it may take. A thread
    cannot be ended from outside. What may take long asks `is_cancelled`, which is true once its client has left, or has
    its answer because the time was over.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(N_THREADS, "llamacli-grammar")
        self._shares: weakref.WeakValueDictionary[str | None, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def run(self, key: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, within the share of a key.

        The key of batches is None. Cancelling this cancels the function's work. Raises QueueTimeoutError if no thread
        is free in time, BadRequestError if the function takes longer.
        """
        most = MOST_OF_BATCHES if key is None else MOST_PER_KEY
        share = self._shares.setdefault(key, asyncio.Semaphore(most))
        loop, left, begun = asyncio.get_running_loop(), threading.Event(), asyncio.Event()

        def work_of_caller() -> T:
            loop.call_soon_threadsafe(begun.set)
            with cancellable_by(left):
                return function(*args, **kwargs)

        def ended(_: Future[T]) -> None:  # the thread goes on after a caller that leaves
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(share.release)

        result: asyncio.Future[T] | None = None
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await share.acquire()
                    try:
                        work = self._pool.submit(work_of_caller)
                    except BaseException:
                        share.release()
                        raise
                    work.add_done_callback(ended)
                    result = asyncio.wrap_future(work)
                    await begun.wait()
            except TimeoutError:
                reason = f"schemas and grammars that came before take longer than {self._seconds:g} seconds to compile"
                raise QueueTimeoutError(reason, retry_after=1) from None
            try:
                async with asyncio.timeout(self._seconds):
                    return await result
            except TimeoutError:
                reason = f"the schema or grammar took longer than {self._seconds:g} seconds to compile"
                raise BadRequestError(reason, None, "invalid_schema") from None
        finally:
            left.set()
            if result is not None:
                result.cancel()

    def close(self) -> None:
        """Begin no more calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)

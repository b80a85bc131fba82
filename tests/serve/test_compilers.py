"""Threads for grammars: shares of keys."""

import asyncio
import threading
import time

import pytest

from llamacli.serve.compilers import MOST_PER_KEY, N_THREADS, Compilers
from llamacli.serve.errors import BadRequestError, QueueTimeoutError
from llamacli.util.cancellation import is_cancelled


def test_results_and_errors() -> None:
    compilers = Compilers()

    async def use() -> None:
        assert await compilers.run("a", int, "12", base=8) == 10
        with pytest.raises(ValueError, match="invalid literal"):
            await compilers.run("a", int, "x")

    asyncio.run(use())
    compilers.close()


def test_long_grammars_of_a_key_leave_a_thread_to_others() -> None:
    compilers, gate = Compilers(), threading.Event()

    async def use() -> None:
        long = [asyncio.create_task(compilers.run("greedy", gate.wait, 30)) for _ in range(3 * N_THREADS)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(compilers.run("modest", int, "1"), 10) == 1
        short = asyncio.create_task(compilers.run("greedy", int, "2"))
        assert not (await asyncio.wait([short], timeout=0.05))[0]
        gate.set()
        assert await asyncio.wait_for(short, 10) == 2
        assert all(await asyncio.gather(*long))

    try:
        asyncio.run(use())
    finally:
        gate.set()
        compilers.close()


def test_grammars_of_batches_hold_up_no_client() -> None:
    compilers, gate = Compilers(0.05), threading.Event()

    async def use() -> None:
        work = [asyncio.create_task(compilers.run(None, gate.wait, 30)) for _ in range(3 * N_THREADS)]
        await asyncio.sleep(0)
        assert await compilers.run("client of the batch", int, "1") == 1
        errors = await asyncio.gather(*work, return_exceptions=True)
        assert [type(error) for error in errors] == [BadRequestError, *[QueueTimeoutError] * (3 * N_THREADS - 1)]

    try:
        asyncio.run(use())
    finally:
        gate.set()
        compilers.close()


def test_callers_that_leave_keep_their_share_until_the_thread_is_free() -> None:
    compilers, gate = Compilers(), threading.Event()

    async def use() -> None:
        for _ in range(2 * N_THREADS):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(compilers.run("greedy", gate.wait, 30), 0.02)
        assert await asyncio.wait_for(compilers.run("modest", int, "1"), 10) == 1
        gate.set()
        both = (compilers.run("greedy", int, str(i)) for i in range(2 * MOST_PER_KEY))
        assert await asyncio.wait_for(asyncio.gather(*both), 10) == [*range(2 * MOST_PER_KEY)]

    try:
        asyncio.run(use())
    finally:
        gate.set()
        compilers.close()


def test_work_learns_that_its_caller_has_left() -> None:
    compilers, ended = Compilers(), threading.Event()

    def work() -> None:
        while not is_cancelled():
            time.sleep(0.001)
        ended.set()

    async def use() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await compilers.run("a", work)
        assert await asyncio.to_thread(ended.wait, 10)
        assert not await compilers.run("a", is_cancelled)

    asyncio.run(use())
    compilers.close()

"""`in_threads`: order, errors, cancellation."""

import asyncio
import threading
from collections.abc import Generator

import pytest

from llamacli.util.asynchronous import in_threads


def test_items_come_in_order_from_other_threads() -> None:
    threads: set[int] = set()

    def numbers() -> Generator[int, None, None]:
        for i in range(20):
            threads.add(threading.get_ident())
            yield i

    async def main() -> list[int]:
        return [item async for item in in_threads(numbers())]

    assert asyncio.run(main()) == list(range(20))
    assert threading.get_ident() not in threads


def test_errors_come_through_and_the_generator_is_closed() -> None:
    closed = []

    def numbers() -> Generator[int, None, None]:
        try:
            yield 1
            raise KeyError("two")
        finally:
            closed.append(True)

    async def main() -> None:
        with pytest.raises(KeyError, match="two"):
            [item async for item in in_threads(numbers())]

    asyncio.run(main())
    assert closed == [True]


def test_cancelling_finishes_the_running_item_then_closes() -> None:
    running, go, events = threading.Event(), threading.Event(), []

    def numbers() -> Generator[int, None, None]:
        try:
            running.set()
            assert go.wait(10)
            events.append("computed")
            yield 1
            events.append("went on")
        finally:
            events.append("closed")

    async def read() -> None:
        async for _ in in_threads(numbers()):
            pass

    async def main() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(running.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert events == []
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["computed", "closed"]

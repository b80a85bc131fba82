"""Generators that compute, run in threads for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio

Item = TypeVar("Item")


async def in_threads(items: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Items of a generator, each computed in a thread.

    Threads are those of the event loop's executor. The generator is closed in the end. When the task is cancelled, the
    item being computed is finished first: a running generator cannot be closed.
    """
    import asyncio  # only programs that use it wait for its import

    end = object()
    step: asyncio.Future[Item | object] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, items, end))
            item = await asyncio.shield(step)
            if item is end:
                return
            yield item  # type: ignore[misc]
    finally:
        if step is not None:
            await asyncio.wait([step])
            step.exception()  # retrieved, or asyncio would log that of a cancelled task's last item
        await asyncio.to_thread(items.close)

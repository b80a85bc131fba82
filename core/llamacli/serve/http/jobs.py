"""Tasks of the server that outlive the requests which began them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import attrs

from llamacli.serve.errors import QueueFullError

MAX_EVENTS = 1000
"""Events that are kept."""
MAX_JOBS = 1000
"""Tasks at once."""


@attrs.define(eq=False)
class Job:
    """Task of an object; `shown` gives its present state.

    None is the state that is stored.
    """

    task: asyncio.Task[None]
    shown: Callable[[], dict[str, Any]] | None = None


def job_of(name: str) -> str:
    """Name of the task that downloads a model."""
    return f"download {name}"


class Events:
    """Last events of models, numbered, for streams that begin at any time."""

    def __init__(self) -> None:
        self.n = 0
        self._last: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def add(self, model: str, kind: str, data: dict[str, Any]) -> None:
        """Add an event in llama-server's form."""
        self.n += 1
        self._last.append({"model": model, "event": kind, "data": data})

    def since(self, n: int) -> list[dict[str, Any]]:
        """Kept events after the first n."""
        return [*self._last][max(0, len(self._last) - (self.n - n)) :] if n < self.n else []


class Jobs:
    """Tasks of the event loop by name."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def expect_room(self) -> None:
        """Raise QueueFullError if no further task may begin."""
        if len(self._jobs) >= MAX_JOBS:
            raise QueueFullError(f"{MAX_JOBS} background requests wait or run already", retry_after=60)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task."""
        self._jobs[name] = job = Job(asyncio.create_task(work))
        job.task.add_done_callback(lambda _: self._jobs.pop(name, None))

    def get(self, name: str) -> Job | None:
        """Task of a name, None once it has ended."""
        return self._jobs.get(name)

    async def cancel(self, name: str) -> None:
        """Cancel a task if it runs, and wait for its end."""
        job = self._jobs.get(name)
        if job is not None:
            job.task.cancel()
            await asyncio.wait({job.task})

    async def close(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        tasks = {job.task for job in self._jobs.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

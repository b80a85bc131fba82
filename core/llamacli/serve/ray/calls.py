"""Calls of replicas: retries at full queues, replays of lost replicas.

Without Ray: what sends a call, and the exceptions that it raises, are arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

import attrs

from llamacli.serve.errors import InternalError, LoadingError, QueueFullError, ServeError, ShuttingDownError
from llamacli.serve.ray.messages import Hello, Route, route_of
from llamacli.serve.ray.policy import Fleet
from llamacli.serve.ray.replay import Sent
from llamacli.serve.ray.replica import SILENCE_S
from llamacli.serve.requests import Done, Event, Failed, Request
from llamacli.serve.settings import MAX_LOST
from llamacli.serve.streams import EventStream

MAX_REFUSALS = 4
"""Replicas, the cheapest first, whose queues are full before a request is refused."""
PAUSE_S = 1.0
"""Seconds between looks for a slot for a request that has begun."""
_RETRY = 5

_log = logging.getLogger(__name__)


class Answers(Protocol):
    """Answers of a replica to a call: its name, then its events."""

    def __aiter__(self) -> AsyncIterator[Hello | list[Event]]:
        """The answers, as they come."""

    def cancel(self) -> None:
        """End the call."""


@attrs.frozen
class Faults:
    """Exceptions of calls: a replica that died, full queues, no replica."""

    died: tuple[type[Exception], ...]
    full: tuple[type[Exception], ...]
    unavailable: tuple[type[Exception], ...]


@attrs.define(eq=False)
class OpenCall:
    """Request that is open.

    `call` and `replica` are those of its present attempt; `replica` is "" until it has answered.
    """

    request: Request
    stream: EventStream
    sent: Sent = attrs.field(factory=Sent)
    task: asyncio.Task[None] | None = None
    call: str = ""
    replica: str = ""


class _LostError(Exception):
    """The replica of a call has died, or is silent."""

    def __init__(self, replica: str, reason: str):
        self.replica = replica
        super().__init__(f"replica {replica or '(unknown)'} {reason}")


class Caller:
    """Caller of replicas, which goes on elsewhere where one fails.

    `send` begins a call. `wait_s` are the seconds that a call waits for a free replica, `silence_s` those after which
    a replica that says nothing counts as lost.
    """

    def __init__(
        self,
        send: Callable[[Request, Route], Answers],
        fleet: Fleet,
        faults: Faults,
        wait_s: float,
        *,
        silence_s: float = SILENCE_S,
    ):
        self._send, self._fleet, self._faults = send, fleet, faults
        self._wait_s, self.silence_s = wait_s, silence_s

    async def run(self, name: str, one: OpenCall) -> None:
        """Run a request to its end; its stream gets each event once."""
        try:
            await self._run(name, one)
        except ServeError as error:
            one.stream.put([Failed(error)])
        except Exception as error:
            _log.error("request %s failed", one.request.id, exc_info=error)
            one.stream.put([Failed(InternalError("the cluster failed: the server's log says why"))])

    async def _run(self, name: str, one: OpenCall) -> None:
        lost, full = list[str](), dict[str, QueueFullError]()
        for attempt in itertools.count():
            one.call = f"{name}/{attempt}"
            one.sent.restart()
            route = route_of(one.request, one.call, frozenset({*lost, *full}))
            try:
                async with contextlib.aclosing(self._attempt(one, route)) as batches:
                    async for events in batches:
                        one.stream.put(one.sent.fresh(events))
                        if events and isinstance(events[-1], Done | Failed):
                            return
            except QueueFullError as error:
                full[one.replica] = error
                left = set(self._fleet.replicas) - {*lost, *full}
                if not left or not one.replica or len(full) >= MAX_REFUSALS:
                    if not one.sent.started:
                        raise min(full.values(), key=lambda error: error.retry_after or 0) from None
                    await asyncio.sleep(PAUSE_S)  # its client has got some of it: it waits for a slot
                    full.clear()
            except _LostError as error:
                lost.append(error.replica)
                _log.warning("request %s: %s; it is repeated on another", one.request.id, error)
                if len(lost) >= MAX_LOST:
                    raise InternalError(f"{len(lost)} replicas were lost during the request") from None

    async def _attempt(self, one: OpenCall, route: Route) -> AsyncGenerator[list[Event]]:
        """Events of a request on one replica: raises _LostError, QueueFullError, LoadingError."""
        one.replica = ""
        deadline = time.monotonic() + self._wait_s
        answers = self._send(one.request, route)
        items = aiter(answers)
        following: asyncio.Future[Hello | list[Event]] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(items))
                while not (await asyncio.wait([following], timeout=self.silence_s))[0]:
                    self._expect_life(one, deadline)
                item = self._result(following, one)
                if isinstance(item, Hello):
                    one.replica = item.replica
                    continue
                match item:
                    case [Failed(error=QueueFullError() as error)]:
                        raise error
                    case [*events, Failed(error=ShuttingDownError())]:
                        yield events
                        raise _LostError(one.replica, "has shut down")
                yield item
        finally:
            if following is not None:
                following.cancel()
            with contextlib.suppress(Exception):  # a call that could not be routed raises its error again
                answers.cancel()

    def _expect_life(self, one: OpenCall, deadline: float) -> None:
        """Raise _LostError for a silent replica, LoadingError for none in time."""
        silent = one.replica or self._fleet.place(one.call)
        if silent:
            self._fleet.suspect(silent)
            raise _LostError(silent, f"was silent for {self.silence_s:g} seconds")
        if time.monotonic() > deadline:
            raise LoadingError("no replica is free", retry_after=_RETRY)

    def _result(self, following: asyncio.Future[Hello | list[Event]], one: OpenCall) -> Hello | list[Event]:
        try:
            return following.result()
        except StopAsyncIteration:
            raise _LostError(one.replica, "has ended it") from None
        except self._faults.died as error:
            raise _LostError(
                one.replica or self._fleet.place(one.call), f"has died ({type(error).__name__})"
            ) from error
        except self._faults.full:
            raise QueueFullError("too many requests: all replicas are full", retry_after=_RETRY) from None
        except self._faults.unavailable:
            raise LoadingError("no replica can be started", retry_after=_RETRY) from None

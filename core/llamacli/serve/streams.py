"""Streams of events that merge what a slow reader has not taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

import attrs

from llamacli.serve.requests import ArgumentsDelta, Done, Event, Failed, PromptProgress, TextDelta, TokenTimings


class EventStream:
    """Stream of one request, in the thread of an event loop.

    `put` adds events, an asynchronous iterator takes them. `on_cancel`, which may be set, is called at most once, with
    the stream's id, when it is cancelled before its end. `on_end_reasoning` ends the reasoning of its request, None
    where that cannot be done.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[str], None] = lambda _: None):
        self._id, self.on_cancel = request_id, on_cancel
        self.on_end_reasoning: Callable[[], None] | None = None
        self._events: list[Event] = []
        self._ended = False
        self._arrived = asyncio.Event()

    @property
    def id(self) -> str:
        """The request's id."""
        return self._id

    def put(self, events: Iterable[Event]) -> None:
        """Add events, merged with those not taken yet; none after the end."""
        for event in events:
            if not self._ended:
                self._add(event)
                self._ended = isinstance(event, Done | Failed)
        if self._events:
            self._arrived.set()

    def cancel(self) -> None:
        """End the stream; see `llamacli.serve.requests.Stream.cancel`."""
        if not self._ended:
            self._ended = True
            self._events.clear()
            self._arrived.set()
            self.on_cancel(self._id)

    def end_reasoning(self) -> bool:
        """End the reasoning; see `llamacli.serve.requests.Stream.end_reasoning`."""
        if self._ended or self.on_end_reasoning is None:
            return False
        self.on_end_reasoning()
        return True

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The events; ends after Done or Failed, or when cancelled."""
        while True:
            await self._arrived.wait()
            if not self._events:
                return
            event = self._events.pop(0)
            if not self._events and not self._ended:
                self._arrived.clear()
            yield event

    async def take(self, timeout: float) -> list[Event]:
        """All events that wait now; none after `timeout` seconds without one.

        In place of iterating. `exhausted` is true after the last.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        events, self._events = self._events, []
        if not self._ended:
            self._arrived.clear()
        return events

    @property
    def exhausted(self) -> bool:
        """True if the stream has ended and all events were taken."""
        return self._ended and not self._events

    def _add(self, event: Event) -> None:
        if isinstance(event, PromptProgress | TokenTimings):
            for i, other in enumerate(self._events):
                if type(other) is type(event) and not _is_first(other):
                    self._events[i] = event
                    return
        if isinstance(event, TextDelta | ArgumentsDelta):
            for i in range(len(self._events) - 1, -1, -1):
                other = self._events[i]
                if getattr(other, "index", event.index) != event.index:
                    continue  # of another choice
                if isinstance(event, ArgumentsDelta):
                    if isinstance(other, ArgumentsDelta) and other.number == event.number:
                        self._events[i] = attrs.evolve(other, text=other.text + event.text)
                        return
                elif isinstance(other, TextDelta) and other.reasoning == event.reasoning:
                    tokens = (*other.tokens, *event.tokens)
                    self._events[i] = attrs.evolve(other, text=other.text + event.text, tokens=tokens)
                    return
                break
        self._events.append(event)


def _is_first(event: Event) -> bool:
    """True for the progress of a prompt before anything is evaluated."""
    return isinstance(event, PromptProgress) and event.processed == event.cached < event.total

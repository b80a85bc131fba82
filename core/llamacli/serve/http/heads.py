"""Timeout for the heads of requests (slowloris): uvicorn has none."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from llamacli.serve.errors import HeadTimeoutError
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.sse import to_json

LOOKS = 4
"""Looks at a connection in the time that a head may take, at least."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.01, 1.0


class Connection(Protocol):
    """Connection of uvicorn, whatever parses its bytes."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """Transport, None before the connection is made."""

    @property
    def cycle(self) -> Any:
        """Last request, with `response_complete`; None before the first."""

    @property
    def timeout_keep_alive_task(self) -> asyncio.TimerHandle | None:
        """Timer that runs from a response until the next byte comes."""


class HeadTimeout:
    """Watch that closes connections whose next request takes too long to begin.

    A connection has `seconds` from its start, or from the first byte after a response, to send the whole head of a
    request. Silence between requests is limited by uvicorn, bodies are by `HttpSettings.read_timeout`.
    """

    def __init__(self, connections: Callable[[], Iterable[Any]], seconds: float):
        self._connections, self._seconds = connections, seconds
        self._since: weakref.WeakKeyDictionary[Connection, float] = weakref.WeakKeyDictionary()

    async def watch(self) -> None:
        """Look at the connections again and again."""
        while True:
            await asyncio.sleep(max(MIN_INTERVAL_S, min(MAX_INTERVAL_S, self._seconds / LOOKS)))
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Close the connections that are late."""
        for connection in list(self._connections()):
            if not _waits_for_head(connection):
                self._since.pop(connection, None)
            elif now - self._since.setdefault(connection, now) >= self._seconds:
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        error = HeadTimeoutError(f"the head of the request did not arrive within {self._seconds:g} seconds")
        body = to_json(openai_body(error))
        head = f"HTTP/1.1 {error.status} Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


def _waits_for_head(connection: Connection) -> bool:
    answered = connection.cycle is None or connection.cycle.response_complete
    return bool(answered) and connection.timeout_keep_alive_task is None

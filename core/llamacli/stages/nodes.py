"""Worker that computes rows of products: its connections and batches."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import attrs

from llamacli.engine.stages import StageRunner
from llamacli.errors import LlamaCliError, StageError
from llamacli.stages.frames import Connection, Frame, address_of
from llamacli.stages.messages import batch_of, send_error
from llamacli.stages.peers import End, Peers

_JOIN_S = 20.0
"""Seconds in which the workers connect to each other."""

LEAVE_S = 3.0
"""Seconds that a caller has to leave a stage that is lost."""

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _NodeEnd:
    """Connection of a worker to another node; see `llamacli.stages.peers.End`.

    It waits for the others as long as the `caller` does, which sees to slow and silent ones.
    """

    connection: Connection
    caller: Connection

    def expect_alive(self, since: float, what: str) -> None:
        """Raise StageError once the caller has left."""
        if self.connection is not self.caller:
            self.caller.expect_open()

    def fail(self, error: StageError) -> None:
        """Close the connection."""
        self.connection.close()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class Arrivals:
    """Connections of other workers, which may come early."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Connection] = {}
        self._changed = threading.Condition()

    def put(self, frame: Frame, connection: Connection) -> None:
        """Take a connection that began with this frame. Raises StageError."""
        with self._changed:
            self._found[frame.text("session"), frame.number("number")] = connection
            self._changed.notify_all()

    @contextlib.contextmanager
    def joined(self, caller: Connection, secret: bytes, number: int) -> Iterator[dict[int, End]]:
        """Connections to the caller and all workers that it names.

        They are closed at the end. This one is worker `number`; it connects to lower numbers. Raises StageError.
        """
        ends: dict[int, End] = {0: _NodeEnd(caller, caller)}
        try:
            frame = caller.receive()
            if frame.kind != "join":
                raise StageError(f"{caller.peer}: it sent {frame.kind!r} instead of 'join'")
            session, workers = frame.text("session"), frame.text("workers").split(",")
            for i, worker in enumerate(workers[: number - 1], start=1):
                connection = Connection.open(address_of(worker), secret, _JOIN_S)
                ends[i] = _NodeEnd(connection, caller)
                connection.send("peer", session=session, number=number)
            for i in range(number + 1, len(workers) + 1):
                ends[i] = _NodeEnd(self._take(session, i), caller)
            yield ends
        finally:
            for end in ends.values():
                end.close()
            with self._changed:
                for connection in self._found.values():
                    connection.close()
                self._found.clear()

    def _take(self, session: str, number: int) -> Connection:
        with self._changed:
            if not self._changed.wait_for(lambda: (session, number) in self._found, _JOIN_S):
                raise StageError(f"worker {number} has not connected in {_JOIN_S:.0f} s")
            return self._found.pop((session, number))


def expect_whole(caller: Connection, runner: StageRunner, error: Exception, leave: Callable[[], None]) -> None:
    """End a stage whose weights are lost by a batch's error.

    The caller is told so: this worker loads them again when it is asked for the stage. `leave` reads until the caller
    has left, for closing a connection with unread frames takes back what was sent. Raises the error then.
    """
    if not runner.program.is_whole:
        send_error(caller, 0, error)
        leave()
        raise error


def _read_to_end(caller: Connection) -> None:
    until = time.monotonic() + LEAVE_S

    def check() -> None:
        if time.monotonic() > until:
            raise StageError(f"{caller.peer}: it does not leave")

    with contextlib.suppress(StageError):
        while True:
            caller.receive(check)


def run_rows(caller: Connection, runner: StageRunner, peers: Peers) -> None:
    """Compute a caller's batches with the other nodes.

    Raises StageError once a connection is lost.
    """
    while True:
        frame = caller.receive()
        number = frame.number("number")
        if frame.kind in ("part", "error") and peers.is_over(number):
            continue  # of a batch that has failed here
        if frame.kind != "batch":
            raise StageError(f"{caller.peer}: it sent {frame.kind!r} instead of a batch")
        peers.number_batch(number)
        try:
            runner.run(*batch_of(frame))
        except Exception as error:
            if peers.is_lost:
                raise
            expect_whole(caller, runner, error, lambda: _read_to_end(caller))
            if not isinstance(error, LlamaCliError):
                _log.exception("%s: batch %d failed", caller.peer, number)
            peers.fail(error)

"""Exchange of columns among nodes that divide the rows of products."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamacli.engine.stages import StageBatch
from llamacli.errors import StageError
from llamacli.stages.frames import Connection
from llamacli.stages.messages import error_of, send_batch, send_error

Floats = npt.NDArray[np.float32]

_SMALL = 1 << 15
"""Bytes that are sent without waiting: two such frames fit into the buffers of a socket."""


class End(Protocol):
    """Connection to another node."""

    connection: Connection

    def expect_alive(self, since: float, what: str) -> None:
        """Raise StageError for a node that is silent or too slow."""

    def fail(self, error: StageError) -> None:
        """Close the connection, which is lost."""

    def close(self) -> None:
        """Close the connection."""


class Peers:
    """Nodes that compute the same batches, see `llamacli.ops.exchange.Exchange` and `llamacli.engine.rows.Nodes`.

    This node has a `number`; the caller's is 0. A node whose batch fails tells all others its error and the
    number of the batch, which then fails there too. Its frames that are still in the
    connections are skipped by that number.
    """

    def __init__(self, number: int):
        self._number, self._batch = number, 0
        self._ends: dict[int, End] = {}
        self._senders = ThreadPoolExecutor(8, "llamacli-rows-send")
        self._is_interrupted = self.is_lost = False

    def connect(self, ends: Mapping[int, End] | Sequence[End]) -> None:
        """Take connections, by number or from node 1 on."""
        self._ends = dict(ends if isinstance(ends, Mapping) else enumerate(ends, start=1))
        self._batch, self.is_lost = 0, False

    def begin(self, batch: StageBatch) -> None:
        """Send a batch to all. Raises StageError."""
        self.number_batch(self._batch + 1)
        received = np.empty((len(batch.tokens), 0), np.float32)
        for end in self._ends.values():
            try:
                send_batch(end.connection, self._batch, batch, received)
            except StageError as error:
                raise self._lost(end, error) from None

    def number_batch(self, number: int) -> None:
        """Begin batch `number`. Raises StageError for one that is not the next."""
        if number != self._batch + 1:
            raise StageError(f"batch {number} was sent instead of {self._batch + 1}")
        self._batch, self._is_interrupted = number, False

    def is_over(self, number: int) -> bool:
        """True for a batch that has been begun here already."""
        return number <= self._batch

    def interrupt(self) -> None:
        """Have the batch fail in its next exchange."""
        self._is_interrupted = True

    def fail(self, error: Exception) -> None:
        """Tell all nodes that the batch has failed.

        If a connection is lost, all are closed.
        """
        for end in self._ends.values():
            if self.is_lost:
                end.close()
                continue
            try:
                send_error(end.connection, self._batch, error)
            except StageError as lost:
                self._lost(end, lost)

    def __call__(self, own: Floats, widths: Sequence[int], *, to_first: bool) -> list[Floats]:
        """See Exchange. Raises StageError, OutOfMemoryError of another node."""
        self._expect_time()
        own, number = np.ascontiguousarray(own, np.float32), self._number
        receives = not (to_first and number)
        targets = [end for i, end in self._ends.items() if own.size and (i == 0 if to_first else True)]
        sending: list[Future[None]] = []
        for end in targets:
            if own.nbytes <= _SMALL:
                self._send(end, own)
            else:
                sending.append(self._senders.submit(self._send, end, own))
        parts = [
            own if i == number else self._receive(i, (len(own), width)) if width else np.empty((len(own), 0), own.dtype)
            for i, width in enumerate(widths if receives else ())
        ]
        for future in sending:
            future.result()
        return parts

    def _send(self, end: End, part: Floats) -> None:
        try:
            end.connection.send("part", [part], number=self._batch)
        except StageError as error:
            raise self._lost(end, error) from None

    def _receive(self, i: int, shape: tuple[int, int]) -> Floats:
        end, since = self._ends[i], time.monotonic()

        def check() -> None:
            self._expect_time()
            end.expect_alive(since, f"a part of batch {self._batch}")

        while True:
            try:
                frame = end.connection.receive(check)
                if frame.kind == "busy":
                    continue
                number = frame.number("number")
                if frame.kind == "error" and number == 0:  # of the node, not of a batch
                    raise error_of(frame, end.connection.peer)
                if number < self._batch:
                    continue
                if number > self._batch or frame.kind not in ("part", "error"):
                    raise StageError(f"it sent {frame.kind!r} of batch {number} instead of a part of {self._batch}")
                arrays = frame.arrays
                if frame.kind == "part" and [(one.dtype.str, one.shape) for one in arrays] != [("<f4", shape)]:
                    found = ", ".join(f"{one.dtype} {one.shape}" for one in arrays)
                    raise StageError(f"it sent {found} instead of float32 {shape}")
            except StageError as error:
                raise self._lost(end, error) from None
            if frame.kind == "error":
                raise error_of(frame, end.connection.peer)
            return arrays[0]

    def _expect_time(self) -> None:
        if self._is_interrupted:
            raise CancelledError("the batch was interrupted")

    def _lost(self, end: End, error: StageError) -> StageError:
        """Close a connection that is lost; the error that names it."""
        peer, self.is_lost = end.connection.peer, True
        named = StageError(str(error) if str(error).startswith(peer) else f"{peer}: {error}")
        end.fail(named)
        return named

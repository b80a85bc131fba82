"""Engine whose stages behind the first are workers on other machines."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Engine, default_engine
from llamacli.engine.base import Program, QuantMode
from llamacli.engine.cutting import cut
from llamacli.engine.memory import Need, stays_on_disk
from llamacli.engine.packed_copies import copy_key
from llamacli.engine.stages import Stage, StageBatch, StagedProgram
from llamacli.errors import InvalidRequestError, LlamaCliError, StageError
from llamacli.gguf import GGUFFile
from llamacli.graph import Graph
from llamacli.kernels.kv_types.types import KVType
from llamacli.kernels.team import check_threads
from llamacli.loaders import ModelFile, identity, unwatched
from llamacli.stages.frames import Connection, Frame
from llamacli.stages.messages import SILENCE_S, digest_of, error_of, send_batch, version
from llamacli.stages.plan import Node, divide, pieces_of, read_speed
from llamacli.util.settings import LoadMode
from llamacli.util.system import available_memory

_log = logging.getLogger(__name__)

BATCH_S = 600.0
"""Seconds that a worker may take for a batch, or to load its stage."""


@attrs.define(eq=False)
class _Waiting:
    number: int
    future: Future[list[npt.NDArray[np.float32]]]
    since: float


class WorkerLink:
    """Stage on a worker, see `llamacli.engine.stages.Stage`.

    `info` is what the worker says of itself. A worker that is silent for `silence_s`, needs `batch_s` for a batch,
    answers what was not asked or closes the connection is lost: all batches then, and from then on, raise StageError.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        silence_s: float = SILENCE_S,
        batch_s: float = BATCH_S,
    ):
        self._silence_s, self._batch_s = silence_s, batch_s
        self._connection = Connection.open(address, secret, silence_s)
        self.name = self._connection.peer
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._number = 0
        self._lost: StageError | None = None
        self._is_closed = False
        try:
            self._connection.send("hello", version=version())
            self.info = self._answer("info")
            if (theirs := self.info.text("version")) != version():
                raise StageError(f"{self.name}: it runs llamacli {theirs}, and this process {version()}")
        except BaseException:
            self._connection.close()
            raise

    @property
    def is_lost(self) -> bool:
        """See Stage."""
        return self._lost is not None

    @property
    def is_faulty(self) -> bool:
        """True if it was lost before it was closed here."""
        return self._lost is not None and not self._is_closed

    @property
    def node(self) -> Node:
        """Its memory and speed."""
        return Node(self.name, self.info.number("memory"), max(1.0, float(self.info.number("speed"))))

    def load(self, graph: Graph, model_id: str, mode: QuantMode, places: Sequence[int], number: int) -> None:
        """Have the worker load its stage.

        Raises StageError. A thread reads its answers from then on.
        """
        if self.info.text("identity") != model_id:
            raise StageError(f"{self.name}: it has another model file, or one with other metadata")
        self._connection.send(
            "load", identity=model_id, mode=mode.value, places=list(places), number=number, graph=digest_of(graph)
        )
        self._answer("loaded")
        threading.Thread(target=self._read, name=self.name, daemon=True).start()

    def start(self, batch: StageBatch, received: npt.NDArray[np.float32]) -> Future[list[npt.NDArray[np.float32]]]:
        """See Stage."""
        future: Future[list[npt.NDArray[np.float32]]] = Future()
        with self._sending:  # in the order of their numbers; the lock stays free for the thread that reads
            with self._lock:
                self._expect_connected()
                self._number += 1
                self._waiting.append(_Waiting(self._number, future, time.monotonic()))
            try:
                send_batch(self._connection, self._number, batch, received)
            except StageError as error:
                self._fail(error)
        return future

    def follow(self, kv_type: KVType, log: npt.NDArray[np.int64]) -> None:
        """See Stage."""
        with self._sending:
            self._expect_connected()
            self._connection.send("follow", [log], k=kv_type.k, v=kv_type.v)

    def close(self) -> None:
        """See Stage."""
        with self._lock:
            self._is_closed = self._lost is None
        self._connection.close()

    def _expect_connected(self) -> None:
        if self._lost is not None:
            raise StageError(str(self._lost))

    def _answer(self, kind: str) -> Frame:
        """Frame of a kind, while no other thread reads."""
        asked = time.monotonic()
        while True:
            frame = self._connection.receive(lambda: self._expect_alive(asked, "an answer"))
            if frame.kind == kind:
                return frame
            if frame.kind == "error":
                raise error_of(frame, self.name)
            if frame.kind != "busy":
                raise StageError(f"{self.name}: it answered {frame.kind!r} instead of {kind!r}")

    def _expect_alive(self, since: float, what: str) -> None:
        now = time.monotonic()
        silent_s = now - max(since, self._connection.heard_at)
        if silent_s > self._silence_s:
            raise StageError(f"{self.name}: it has sent nothing for {silent_s:.0f} s, and {what} is missing")
        if now - since > self._batch_s:
            raise StageError(f"{self.name}: {what} is missing after {now - since:.0f} s")

    def _check(self) -> None:
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            self._expect_alive(first.since, f"the result of batch {first.number}")

    def _read(self) -> None:
        """Give the results of batches to those who wait."""
        try:
            while True:
                frame = self._connection.receive(self._check)
                if frame.kind != "busy":
                    self._settle(frame)
        except Exception as error:
            self._fail(error if isinstance(error, StageError) else StageError(f"{self.name}: {error!r}"))

    def _settle(self, frame: Frame) -> None:
        if frame.kind not in ("result", "error"):
            raise StageError(f"{self.name}: it sent a frame of kind {frame.kind!r}")
        number = frame.number("number")
        with self._lock:
            if not self._waiting or self._waiting[0].number != number:
                raise StageError(f"{self.name}: it answered batch {number}, which was not asked, or twice")
            done = self._waiting.popleft()
            if self._waiting:
                self._waiting[0].since = time.monotonic()
        if frame.kind == "error":
            done.future.set_exception(error_of(frame, self.name))
        else:
            done.future.set_result(frame.arrays)

    def _fail(self, error: StageError) -> None:
        with self._lock:
            self._lost = self._lost or error
            waiting = list(self._waiting)
            self._waiting.clear()
        self._connection.close()
        for one in waiting:
            one.future.set_exception(StageError(str(error)))


Address = tuple[str, int]


class Spares(Protocol):
    """Workers that replace others; its length is how many may be tried."""

    def __len__(self) -> int: ...

    def exchange(self, lost: Address) -> Address:
        """Worker in place of a lost one. Raises StageError for none."""


class SpareList(deque[Address]):
    """Spare workers; a lost one comes last: it may start again."""

    def exchange(self, lost: Address) -> Address:
        """See Spares."""
        self.append(lost)
        return self.popleft()


class StagedEngine:
    """Engine that divides a model among this process and workers.

    `addresses` are those of the workers, in the order of their layers; one of `spares` takes the place of a worker that
    does not answer or is lost. `split` gives the shares of all nodes,
    this one first, by default what the memory and speed of each allow. `threads` and `load` are those of this process.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: bytes,
        *,
        threads: int | None = None,
        spares: Spares | None = None,
        split: Sequence[float] | None = None,
        load: LoadMode = LoadMode.AUTO,
        silence_s: float = SILENCE_S,
        batch_s: float = BATCH_S,
    ):
        if split is not None and (len(split) != len(addresses) + 1 or not all(share > 0 for share in split)):
            raise InvalidRequestError(
                f"the split has shares {list(split)}, expected {len(addresses) + 1} positive numbers: this process and "
                f"{len(addresses)} workers"
            )
        self._addresses, self._secret, self._split = list(addresses), secret, split
        self._spares: Spares = SpareList() if spares is None else spares
        self._threads, self._load, self._timeouts = threads, load, {"silence_s": silence_s, "batch_s": batch_s}

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        """See `llamacli.engine.base.Engine`. Raises StageError for a worker that does not fit."""
        file = unwatched(file)
        links = list[WorkerLink]()
        try:
            self._connect(links)
            own = Node("this process", available_memory() or 1 << 62, read_speed(check_threads(self._threads)))
            places = divide(pieces_of(graph, file), [own, *(link.node for link in links)], self._split)
            model_id, graphs = identity(file), cut(graph, places)
            load = functools.partial(WorkerLink.load, graph=graph, model_id=model_id, mode=mode, places=places)
            with ThreadPoolExecutor(len(links)) as pool:
                loading = pool.map(lambda pair: load(pair[1], number=pair[0]), enumerate(links, start=1))
                first = stage_engine(graphs[0], file, model_id, mode, places, 0, self._threads, self._load)
                program = first.compile(graphs[0], file, mode)
                list(loading)
        except BaseException:
            for link in links:
                link.close()
            raise
        return StagedProgram(graphs, program, links, functools.partial(self._replaced, load))

    def _replaced(self, load: Callable[..., None], lost: Sequence[Stage]) -> list[WorkerLink]:
        """Links to present workers, spare ones for those at fault."""
        links = list[WorkerLink]()
        try:
            for i, link in enumerate(lost):
                if isinstance(link, WorkerLink) and link.is_faulty:
                    self._take_spare(i, f"{link.name} is lost")
            self._connect(links)
            with ThreadPoolExecutor(len(links)) as pool:
                list(pool.map(lambda pair: load(pair[1], number=pair[0]), enumerate(links, start=1)))
        except BaseException as error:
            for link in links:
                link.close()
            if isinstance(error, LlamaCliError) and not isinstance(error, StageError):
                raise StageError(str(error)) from error
            raise
        return links

    def _connect(self, links: list[WorkerLink]) -> None:
        """Connect to each worker, or to the next spare one that answers."""
        for i in range(len(self._addresses)):
            n_left = len(self._spares)
            while len(links) == i:
                try:
                    links.append(WorkerLink(self._addresses[i], self._secret, **self._timeouts))
                except StageError as error:
                    if not n_left:
                        raise
                    n_left -= 1
                    self._take_spare(i, str(error))

    def _take_spare(self, i: int, reason: str) -> None:
        self._addresses[i] = self._spares.exchange(self._addresses[i])
        _log.warning("%s; worker %s:%d takes its place", reason, *self._addresses[i])


class WorkerSource(Protocol):
    """Workers of a server's model."""

    def engine(self, threads: int | None, load: str) -> StagedEngine:
        """Engine of a model that is divided among them. Raises LlamaCliError."""


@attrs.frozen
class Workers:
    """Addresses of workers, their secret, shares; see `StagedEngine`."""

    addresses: tuple[Address, ...]
    secret: bytes = attrs.field(repr=False)
    split: tuple[float, ...] | None = None
    spares: tuple[Address, ...] = ()

    def engine(self, threads: int | None, load: str) -> StagedEngine:
        """Engine of a model that is divided among them. Raises InvalidRequestError."""
        return StagedEngine(
            self.addresses,
            self.secret,
            threads=threads,
            spares=SpareList(self.spares),
            split=self.split,
            load=LoadMode(load),
        )


def stage_engine(
    graph: Graph,
    file: ModelFile,
    model_id: str,
    mode: QuantMode,
    places: Sequence[int],
    number: int,
    threads: int | None,
    load: LoadMode,
) -> Engine:
    """Engine of a stage, with a packed copy of its weights.

    Raises OutOfMemoryError.
    """
    key = (
        copy_key(file.paths, model_id, f"{mode.value} {list(places)} {number}") if isinstance(file, GGUFFile) else None
    )
    mapped = stays_on_disk(load, Need.of(graph, file, mode), file.path, can_map=key is not None)
    return default_engine(threads, key, mapped=mapped)

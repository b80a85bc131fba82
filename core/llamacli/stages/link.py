"""Engine that divides a model among this process and workers."""

from __future__ import annotations

import functools
import logging
import secrets
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
from llamacli.engine.rows import RowsProgram
from llamacli.engine.stages import Stage, StageBatch, StagedProgram
from llamacli.errors import InvalidRequestError, LlamaCliError, StageError
from llamacli.gguf import GGUFFile
from llamacli.graph import Graph
from llamacli.kernels.kv_types.types import KVType
from llamacli.kernels.team import check_threads
from llamacli.loaders import ModelFile, identity, unwatched
from llamacli.stages.frames import Connection, Frame, text_of
from llamacli.stages.messages import SILENCE_S, digest_of, error_of, send_batch, version
from llamacli.stages.peers import Peers
from llamacli.stages.plan import Division, Node, divide, pieces_of, read_speed, shares_of
from llamacli.util.settings import LoadMode, SplitMode
from llamacli.util.system import available_memory

_log = logging.getLogger(__name__)

BATCH_S = 600.0
"""Seconds that a worker may take for a batch, or to load its stage."""


Address = tuple[str, int]


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
        self.connection = Connection.open(address, secret, silence_s)
        self.name = self.connection.peer
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._number = 0
        self._lost: StageError | None = None
        self._is_closed = False
        try:
            self.connection.send("hello", version=version())
            self.info = self._answer("info")
            if (theirs := self.info.text("version")) != version():
                raise StageError(f"{self.name}: it runs llamacli {theirs}, and this process {version()}")
        except BaseException:
            self.connection.close()
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

    def load(self, graph: Graph, model_id: str, mode: QuantMode, division: Division, number: int) -> None:
        """Have the worker load its part.

        Raises StageError. If it is a stage, a thread reads its answers from then on.
        """
        if self.info.text("identity") != model_id:
            raise StageError(f"{self.name}: it has another model file, or one with other metadata")
        self.connection.send(
            "load",
            identity=model_id,
            mode=mode.value,
            split=division.mode.value,
            numbers=list(division.numbers),
            number=number,
            graph=digest_of(graph),
        )
        self._answer("loaded")
        if division.mode is SplitMode.LAYER:
            threading.Thread(target=self._read, name=self.name, daemon=True).start()

    def join(self, session: str, workers: Sequence[Address]) -> None:
        """Have the worker connect to the others. Raises StageError."""
        self.connection.send("join", session=session, workers=",".join(map(text_of, workers)))
        self._answer("joined")

    def start(self, batch: StageBatch, received: npt.NDArray[np.float32]) -> Future[list[npt.NDArray[np.float32]]]:
        """See Stage."""
        future: Future[list[npt.NDArray[np.float32]]] = Future()
        with self._sending:  # in the order of their numbers; the lock stays free for the thread that reads
            with self._lock:
                self._expect_connected()
                self._number += 1
                self._waiting.append(_Waiting(self._number, future, time.monotonic()))
            try:
                send_batch(self.connection, self._number, batch, received)
            except StageError as error:
                self.fail(error)
        return future

    def follow(self, kv_type: KVType, log: npt.NDArray[np.int64]) -> None:
        """See Stage."""
        with self._sending:
            self._expect_connected()
            self.connection.send("follow", [log], k=kv_type.k, v=kv_type.v)

    def close(self) -> None:
        """See Stage."""
        with self._lock:
            self._is_closed = self._lost is None
        self.connection.close()

    def _expect_connected(self) -> None:
        if self._lost is not None:
            raise StageError(str(self._lost))

    def _answer(self, kind: str) -> Frame:
        """Frame of a kind, while no other thread reads."""
        asked = time.monotonic()
        while True:
            frame = self.connection.receive(lambda: self.expect_alive(asked, "an answer"))
            if frame.kind == kind:
                return frame
            if frame.kind == "error":
                raise error_of(frame, self.name)
            if frame.kind != "busy":
                raise StageError(f"{self.name}: it answered {frame.kind!r} instead of {kind!r}")

    def expect_alive(self, since: float, what: str) -> None:
        """Raise StageError for a worker that is silent or too slow."""
        now = time.monotonic()
        silent_s = now - max(since, self.connection.heard_at)
        if silent_s > self._silence_s:
            raise StageError(f"{self.name}: it has sent nothing for {silent_s:.0f} s, and {what} is missing")
        if now - since > self._batch_s:
            raise StageError(f"{self.name}: {what} is missing after {now - since:.0f} s")

    def _check(self) -> None:
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            self.expect_alive(first.since, f"the result of batch {first.number}")

    def _read(self) -> None:
        """Give the results of batches to those who wait."""
        try:
            while True:
                frame = self.connection.receive(self._check)
                if frame.kind != "busy":
                    self._settle(frame)
        except Exception as error:
            self.fail(error if isinstance(error, StageError) else StageError(f"{self.name}: {error!r}"))

    def _settle(self, frame: Frame) -> None:
        if frame.kind not in ("result", "error"):
            raise StageError(f"{self.name}: it sent a frame of kind {frame.kind!r}")
        number = frame.number("number")
        if frame.kind == "error" and number == 0:  # of the stage, not of a batch
            raise error_of(frame, self.name)
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

    def fail(self, error: StageError) -> None:
        """Take the worker as lost; all batches that wait for it fail."""
        with self._lock:
            self._lost = self._lost or error
            waiting = list(self._waiting)
            self._waiting.clear()
        self.connection.close()
        for one in waiting:
            one.future.set_exception(StageError(str(error)))


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
    does not answer or is lost. `mode`: layers or rows of products are divided. `split` gives the shares
    of all nodes, this one first, by default what the memory and speed of each allow. `threads` and `load` are those of
    this process.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: bytes,
        *,
        mode: SplitMode = SplitMode.LAYER,
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
        self._addresses, self._secret, self._mode, self._split = list(addresses), secret, mode, split
        self._spares: Spares = SpareList() if spares is None else spares
        self._threads, self._load, self._timeouts = threads, load, {"silence_s": silence_s, "batch_s": batch_s}

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        """See `llamacli.engine.base.Engine`. Raises StageError for a worker that does not fit."""
        file = unwatched(file)
        links, peers = list[WorkerLink](), Peers(0)
        try:
            self._connect(links)
            own = Node("this process", available_memory() or 1 << 62, read_speed(check_threads(self._threads)))
            nodes = [own, *(link.node for link in links)]
            if self._mode is SplitMode.LAYER:
                numbers = divide(pieces_of(graph, file), nodes, self._split)
            else:
                numbers = shares_of(graph, file, nodes, self._split)
            model_id, division = identity(file), Division(self._mode, tuple(numbers))
            part = division.part(graph, 0, peers)
            load = functools.partial(WorkerLink.load, graph=graph, model_id=model_id, mode=mode, division=division)
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(self._prepare, links, load)
                first = stage_engine(part, file, model_id, mode, division, 0, self._threads, self._load)
                program = first.compile(part, file, mode)
                loading.result()
        except BaseException:
            for link in links:
                link.close()
            raise
        replaced = functools.partial(self._replaced, load)
        if self._mode is SplitMode.LAYER:
            return StagedProgram(cut(graph, numbers), program, links, replaced)
        peers.connect(links)
        return RowsProgram(part, program, links, peers, replaced)

    def _prepare(self, links: Sequence[WorkerLink], load: Callable[..., None]) -> None:
        """Have all workers load their parts, and connect to each other."""
        with ThreadPoolExecutor(len(links)) as pool:
            list(pool.map(lambda pair: load(pair[1], number=pair[0]), enumerate(links, start=1)))
            if self._mode is SplitMode.ROW:
                session = secrets.token_hex()
                list(pool.map(lambda link: link.join(session, self._addresses), links))

    def _replaced(self, load: Callable[..., None], lost: Sequence[Stage]) -> list[WorkerLink]:
        """Links to present workers, spare ones for those at fault."""
        links = list[WorkerLink]()
        try:
            for i, link in enumerate(lost):
                if isinstance(link, WorkerLink) and link.is_faulty:
                    self._take_spare(i, f"{link.name} is lost")
            self._connect(links)
            self._prepare(links, load)
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
    mode: SplitMode = SplitMode.LAYER

    def engine(self, threads: int | None, load: str) -> StagedEngine:
        """Engine of a model that is divided among them. Raises InvalidRequestError."""
        return StagedEngine(
            self.addresses,
            self.secret,
            mode=self.mode,
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
    division: Division,
    number: int,
    threads: int | None,
    load: LoadMode,
) -> Engine:
    """Engine of a node's part, with a packed copy of its weights.

    Raises OutOfMemoryError.
    """
    key = copy_key(file.paths, model_id, f"{mode.value} {division} {number}") if isinstance(file, GGUFFile) else None
    mapped = stays_on_disk(load, Need.of(graph, file, mode), file.path, can_map=key is not None)
    return default_engine(threads, key, mapped=mapped)

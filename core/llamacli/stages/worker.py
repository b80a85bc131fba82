"""Worker: the server of a part of a model."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamacli.engine import Program, QuantMode
from llamacli.engine.stages import StageRunner
from llamacli.errors import InvalidRequestError, LlamaCliError, StageError
from llamacli.graph import Graph
from llamacli.kernels.team import check_threads
from llamacli.loaders import ModelFile, identity, open_model_file, unwatched
from llamacli.model import Model, load_model
from llamacli.plugins import Plugins, installed_plugins
from llamacli.stages.frames import Connection, Frame
from llamacli.stages.link import stage_engine
from llamacli.stages.messages import BEAT_S, batch_of, digest_of, kv_type_of, send_error, version
from llamacli.stages.nodes import LEAVE_S, Arrivals, expect_whole, run_rows
from llamacli.stages.peers import Peers
from llamacli.stages.plan import Division, read_speed
from llamacli.util.settings import LoadMode, SplitMode
from llamacli.util.system import available_memory

_GREETING_S = 5.0
"""Seconds that a caller has to prove its secret."""

_TURN_S = 3.0
"""Seconds that a caller waits for the one before it to leave."""

_GREETERS = 8
_QUEUED = 64
"""Frames that wait while a batch is computed."""

_log = logging.getLogger(__name__)


class _StageOf:
    """Engine of the part that a caller asks for.

    Both must have traced the same graph. `n_bytes`: size of its tensors. `peers` exchange columns with other nodes.
    """

    def __init__(self, request: Frame, model_id: str, threads: int | None, load: LoadMode):
        mode, self.number = request.text("split"), request.number("number")
        if mode not in tuple(SplitMode):
            raise StageError(f"a model is divided by {', '.join(SplitMode)}, not by {mode!r}")
        self._division = Division(SplitMode(mode), tuple(request.numbers("numbers")))
        if self.number == 0 or min(self._division.numbers, default=0) < 1:
            raise StageError(f"{self._division} has no part {self.number} of a worker")
        self._graph, self._id, self._threads, self._load = request.text("graph"), model_id, threads, load
        self.peers = Peers(self.number)
        self.n_bytes = 0

    @property
    def has_peers(self) -> bool:
        """True if rows of products are divided."""
        return self._division.mode is SplitMode.ROW

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        file = unwatched(file)
        if self._graph != digest_of(graph):
            raise StageError("the plugins of the two processes record different forward passes")
        part = self._division.part(graph, self.number, self.peers)
        names = {tensor.name for op in part.ops for tensor in op.tensors()}
        self.n_bytes = sum(file.tensors[name].n_bytes for name in names)
        engine = stage_engine(part, file, self._id, mode, self._division, self.number, self._threads, self._load)
        return engine.compile(part, file, mode)


class Worker:
    """Server of a model's part, for one caller at a time.

    `path` is the model's file, the same as the caller's. The part that was loaded last stays loaded.
    """

    def __init__(
        self,
        path: Path,
        secret: bytes,
        *,
        threads: int | None = None,
        load: LoadMode = LoadMode.AUTO,
        plugins: Plugins | None = None,
    ):
        self._path, self._secret, self._threads, self._load = path, secret, check_threads(threads), load
        self._plugins = plugins or installed_plugins()
        with contextlib.closing(open_model_file(path, self._plugins.loaders())) as file:
            self._identity = identity(file)
        self._speed = int(read_speed(self._threads))
        self._serving = threading.Lock()
        self._model: Model | None = None
        self._part: _StageOf | None = None
        self._loaded: object = None
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._ended = False
        self._arrivals = Arrivals()

    def serve(self, listener: socket.socket) -> None:
        """Serve callers until the listening socket is closed."""
        with ThreadPoolExecutor(_GREETERS) as greeters:
            try:
                while True:
                    sock, address = listener.accept()
                    greeters.submit(self._greet, sock, f"caller {address[0]}:{address[1]}")
            except OSError:
                _log.debug("no longer listening")
            finally:
                self._ended = True
                for connection in list(self._connections):
                    connection.close()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            connection = Connection.accept(sock, peer, self._secret, _GREETING_S)
        except StageError as error:
            _log.warning("%s", error)
            sock.close()
            return
        self._connections.add(connection)
        if self._ended:  # and has closed the connections that it knew
            connection.close()
        try:
            frame = connection.receive()
            if frame.kind == "peer":
                self._arrivals.put(frame, connection)
                return
            self._serve_one(connection, frame)
        except LlamaCliError as error:
            _log.info("%s", error)
        except Exception:
            _log.exception("%s: the stage failed", peer)
        connection.close()

    def _serve_one(self, connection: Connection, frame: Frame) -> None:
        if frame.kind != "hello":
            raise StageError(f"{connection.peer}: it began with {frame.kind!r}")
        if not self._serving.acquire(timeout=_TURN_S):
            send_error(connection, 0, StageError("it serves another caller"))
            return
        try:
            memory = available_memory() or 1 << 62
            memory += self._part.n_bytes if self._part else 0  # which loading another part would free
            connection.send("info", version=version(), identity=self._identity, memory=memory, speed=self._speed)
            with _Beats(connection):
                runner = self._load_stage(connection, connection.receive())
                connection.send("loaded")
                _log.info("%s: stage loaded", connection.peer)
                part = self._part
                if part is not None and part.has_peers:
                    with self._arrivals.joined(connection, self._secret, part.number) as ends:
                        part.peers.connect(ends)
                        connection.send("joined")
                        run_rows(connection, runner, part.peers)
                else:
                    _run_batches(connection, runner)
        finally:
            self._serving.release()

    def _load_stage(self, connection: Connection, request: Frame) -> StageRunner:
        """Load the stage that a caller asks for.

        The caller gets the error that is raised, too.
        """
        try:
            if request.kind != "load" or request.text("identity") != self._identity:
                raise StageError("it asks for another model, or for none")
            if request.text("mode") not in tuple(QuantMode):
                raise StageError(f"mode {request.text('mode')!r} is not one of {', '.join(QuantMode)}")
            mode, wanted = QuantMode(request.text("mode")), dict(request.fields)
            if self._model is None or self._loaded != wanted or not self._model.program.is_whole:
                if self._model is not None:
                    self._model.close()
                    self._model = self._part = None
                part = _StageOf(request, self._identity, self._threads, self._load)
                self._model, self._loaded = load_model(self._path, mode, plugins=self._plugins, engine=part), wanted
                self._part = part
            return StageRunner(self._model.program)
        except Exception as error:
            send_error(connection, 0, error)
            raise


def _run_batches(connection: Connection, runner: StageRunner) -> None:
    """Compute the batches of a connection, in order, until it ends."""
    frames: queue.Queue[Frame | Exception] = queue.Queue(_QUEUED)
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.is_set():
                _put(frames, connection.receive(), ended)
        except Exception as error:
            _put(frames, error, ended)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    expected = 1
    try:
        while True:
            frame = frames.get()
            if isinstance(frame, Exception):
                raise frame
            if frame.kind == "follow":
                with contextlib.suppress(MemoryError):  # what reads these pages fails
                    runner.follow(kv_type_of(frame), _log_of(frame))
                continue
            if frame.kind != "batch" or frame.number("number") != expected:
                raise StageError(
                    f"{connection.peer}: it sent {frame.kind!r} {frame.fields} instead of batch {expected}"
                )
            try:
                results = runner.run(*batch_of(frame))
            except Exception as error:
                expect_whole(connection, runner, error, lambda: reader.join(LEAVE_S))
                if not isinstance(error, LlamaCliError):
                    _log.exception("%s: batch %d failed", connection.peer, expected)
                send_error(connection, expected, error)
            else:
                connection.send("result", results, number=expected)
            expected += 1
    finally:
        ended.set()
        connection.close()
        reader.join()


def _put(frames: queue.Queue[Frame | Exception], frame: Frame | Exception, ended: threading.Event) -> None:
    while not ended.is_set():
        with contextlib.suppress(queue.Full):
            frames.put(frame, timeout=1)
            return


def _log_of(frame: Frame) -> npt.NDArray[np.int64]:
    if len(frame.arrays) != 1 or frame.arrays[0].dtype.str != "<i8" or frame.arrays[0].shape[1:] != (5,):
        raise StageError("a frame of changes of pages is malformed")
    return frame.arrays[0]


class _Beats(contextlib.AbstractContextManager["_Beats"]):
    """Thread that tells a caller now and then that the worker lives."""

    def __init__(self, connection: Connection):
        self._connection, self._ended = connection, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._connection.send("busy")
            except StageError:
                return

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def listen(address: tuple[str, int]) -> socket.socket:
    """Socket that listens at an address. Raises InvalidRequestError."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise InvalidRequestError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}") from None

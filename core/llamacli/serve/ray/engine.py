"""Engine of the ingress: requests run on replicas of a cluster."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.serve import exceptions as serve_errors

from llamacli.errors import InvalidRequestError, LlamaCliError
from llamacli.generation.drafters import MTP
from llamacli.serve import errors
from llamacli.serve.engine import LocalPin
from llamacli.serve.metrics import EngineStats
from llamacli.serve.models import Entry, ModelSource, find_encoder, unloaded_info
from llamacli.serve.ray import deployment
from llamacli.serve.ray.calls import Answers, Caller, Faults, OpenCall
from llamacli.serve.ray.messages import Route, Setup, portable
from llamacli.serve.ray.replica import BEAT_S, file_digest
from llamacli.serve.ray.settings import RaySettings
from llamacli.serve.ray.tokenizing import context_length, load_unweighted
from llamacli.serve.ray.view import forget_view, view_of
from llamacli.serve.requests import AdapterScales, Failed, ModelInfo, Request, Slots
from llamacli.serve.settings import EngineSettings
from llamacli.serve.streams import EventStream

_RETRY = 5
_POLL_S = 0.01
_FAULTS = Faults(
    died=(ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, serve_errors.ReplicaUnavailableError),
    full=(serve_errors.BackPressureError,),
    unavailable=(serve_errors.DeploymentUnavailableError,),
)

_log = logging.getLogger(__name__)


class RayEngine:
    """Engine whose requests run on replicas; see `llamacli.serve.requests.Engine`.

    It has the tokenizer and templates of one model, without weights. A request whose replica dies, or is silent for
    SILENCE_S, is repeated on another, and its client sees a pause: texts depend on the request alone. Limits of
    `settings` are those of each replica, but `max_per_key` is of this ingress.
    """

    def __init__(
        self, source: ModelSource, settings: EngineSettings, cluster: RaySettings, *, shutdown_timeout: float = 30.0
    ):
        """Connect to the cluster.

        Raises ClusterError if that is not possible, what `load_model` raises, and InvalidRequestError if the model has
        not the prediction head that is asked for.
        """
        self._source, self._cluster, self._entry = source, cluster, Entry(source)
        self._model = load_unweighted(source.path, settings.mode, settings.overrides, source.mmproj)
        if source.draft == MTP and not self._model.has_nextn:
            raise InvalidRequestError(f"the model {self._model.name!r} has no multi-token-prediction head")
        encoder = find_encoder(self._model)
        mmproj = None if encoder is None else Path(encoder.metadata.source).resolve()
        self._settings = attrs.evolve(settings, n_ctx=context_length(self._model, settings.n_ctx))
        cpus = deployment.connect(cluster)
        threads = settings.threads or max(1, int(cpus))
        limits = attrs.evolve(self._settings, max_per_key=None, models_max=1, idle_unload=None, threads=threads)
        self._setup = Setup(
            self._model.identity, str(source.path.resolve()), source.name, attrs.asdict(limits, recurse=False), cpus,
            cluster.replicas, shutdown_timeout,
            tuple((str(path.resolve()), file_digest(path)) for path, _ in source.adapters), source.draft == MTP,
            None if mmproj is None else (str(mmproj), file_digest(mmproj)),
        )  # fmt: skip
        self._limits = limits
        self._ingress = secrets.token_hex(8)
        self._view = view_of(cluster.app, self._ingress)
        self._info: ModelInfo | None = None
        self._handle: Any = None
        self._loader = ThreadPoolExecutor(1, "llamacli-deploy")
        self._loading: Future[ModelInfo] | None = None
        self._numbers = itertools.count()
        self._open: dict[str, OpenCall] = {}
        self._keys: collections.Counter[str] = collections.Counter()
        self._beats: asyncio.Task[None] | None = None
        self._draining = self._closed = False
        self._caller = Caller(self._send, self._view.fleet, _FAULTS, settings.load_timeout)

    # --- see llamacli.serve.requests.Engine

    def models(self) -> tuple[ModelInfo, ...]:
        info = self._info or unloaded_info(self._source)
        return (attrs.evolve(info, adapters=self._entry.adapters),)

    async def pin(self, name: str) -> LocalPin:
        self._expect_name(name)
        if self._info is None:
            future = asyncio.wrap_future(self.load(name))
            try:
                await asyncio.wait_for(asyncio.shield(future), self._settings.load_timeout)
            except TimeoutError:
                raise errors.LoadingError("no replica runs yet", retry_after=_RETRY) from None
            except errors.ServeError:
                raise
            except LlamaCliError as error:
                _log.error("there are no replicas", exc_info=error)
                raise errors.InternalError("the replicas cannot be started: the server's log says why") from error
        return LocalPin(self._model, lambda: None)

    def set_adapters(self, name: str, scales: AdapterScales) -> None:
        self._expect_name(name)
        self._entry.set_adapters(scales)

    def unload(self, name: str) -> None:
        """Check the name; the replicas keep the model."""
        self._expect_name(name)

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Check the name; the replicas keep the model."""
        self._expect_name(name)

    def add(self, source: ModelSource) -> None:
        raise errors.NotSupportedError("servers with --ray have one model")

    def offer(self, sources: Sequence[ModelSource]) -> None:
        raise errors.NotSupportedError("servers with --ray have one model")

    def remove(self, name: str) -> None:
        raise errors.NotSupportedError("servers with --ray have one model")

    def slots(self, name: str) -> Slots:
        raise errors.NotSupportedError("slots are those of a replica: servers with --ray do not save them")

    def expect_room(self) -> None:
        """See Engine; only the replicas know their queues."""

    def submit(self, request: Request) -> EventStream:
        self._expect_name(request.model)
        if self._draining or self._closed:
            raise errors.ShuttingDownError("the server is shutting down", retry_after=_RETRY)
        if self._info is None:
            raise errors.LoadingError("no replica runs yet", retry_after=_RETRY)
        most, key = self._settings.max_per_key, request.key
        if most is not None and self._keys[key] >= most:
            raise errors.QueueFullError(
                f"too many requests: {self._keys[key]} requests of this key wait or run already, {most} are allowed",
                retry_after=_RETRY,
            )
        stream = EventStream(request.id)
        one = OpenCall(portable(request), stream)
        name = f"{self._ingress}/{next(self._numbers)}"
        self._open[name] = one
        self._keys[key] += 1
        one.task = asyncio.create_task(self._caller.run(name, one))
        one.task.add_done_callback(functools.partial(self._ended, name, key))
        stream.on_cancel = functools.partial(_cancel, one.task)
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat())
        return stream

    def stats(self) -> EngineStats:
        if self._draining or self._closed:
            status = "draining"
        else:
            status = "loading" if self._info is None else self._view.status
        if self._info is None:
            return EngineStats(status, {})
        name = self._source.name
        return EngineStats(status, {name: self._view.stats()}, {name: self._view.loads()})

    async def drain(self, timeout: float) -> None:
        self._draining = True
        deadline = time.monotonic() + timeout
        error = errors.ShuttingDownError("the server is shutting down", retry_after=_RETRY)
        self._fail_all(error, waiting_only=True)
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._fail_all(error)
        tasks = [one.task for one in self._open.values() if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=BEAT_S)
        if self._beats is not None:
            self._beats.cancel()

    def close(self) -> None:
        """End the replicas, unless they are kept, and leave the cluster."""
        if self._closed:
            return
        self._closed = True
        self._loader.shutdown(wait=False, cancel_futures=True)
        if not self._cluster.keep:
            deployment.delete(self._cluster.app)
        deployment.disconnect()
        forget_view(self._cluster.app)
        self._model.close()

    # --- from any thread

    def load(self, name: str) -> Future[ModelInfo]:
        """Start the replicas; future of the description of the first one's model.

        The future raises ClusterError.
        """
        self._expect_name(name)
        if self._loading is None:
            self._loading = self._loader.submit(self._deploy)
        return self._loading

    @property
    def n_replicas(self) -> int:
        """Replicas that run."""
        return len(self._view.fleet.replicas)

    def _deploy(self) -> ModelInfo:
        handle = deployment.deploy(self._cluster, self._limits, self._setup)
        deployment.wait_for_replica(self._cluster.app)
        info, _ = handle.describe.remote(Route()).result(timeout_s=self._settings.load_timeout)
        own = unloaded_info(self._source)
        self._handle = handle
        self._info = attrs.evolve(info, path=own.path, created=own.created, aliases=own.aliases, n_bytes=own.n_bytes)
        return self._info

    # --- requests

    def _send(self, request: Request, route: Route) -> Answers:
        answers: Answers = self._handle.options(stream=True).generate.remote(request, route)
        return answers

    def _expect_name(self, name: str) -> None:
        if name not in (self._source.name, *self._source.aliases):
            raise errors.UnknownModelError(f"the model {name!r} does not exist: the server has {self._source.name}")

    def _ended(self, name: str, key: str, task: asyncio.Task[None]) -> None:
        del self._open[name]
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        if not task.cancelled() and task.exception() is not None:
            _log.error("request %s failed", name, exc_info=task.exception())

    def _fail_all(self, error: errors.ServeError, *, waiting_only: bool = False) -> None:
        for one in list(self._open.values()):
            if not (waiting_only and one.sent.started):
                one.stream.put([Failed(error)])
                if one.task is not None:
                    one.task.cancel()

    # --- signs of life

    async def _beat(self) -> None:
        """Tell replicas which of their calls are open; log failing replicas."""
        told = ""
        while True:
            await asyncio.sleep(BEAT_S)
            calls: dict[str, list[str]] = {}
            for one in self._open.values():
                if one.replica:
                    calls.setdefault(one.replica, []).append(one.call)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await asyncio.gather(
                        *(self._tell(replica, names) for replica, names in calls.items()), return_exceptions=True
                    )
            with contextlib.suppress(Exception):  # the controller may be moving to another node
                message = await asyncio.to_thread(deployment.troubles, self._cluster.app)
                if message and message != told:
                    _log.warning("the cluster cannot run all replicas: %s", message)
                told = message

    async def _tell(self, replica: str, calls: list[str]) -> None:
        await self._handle.beat.remote(self._ingress, calls, Route(only=replica))


def _cancel(task: asyncio.Task[None], _: str) -> None:
    task.cancel()

"""Replica: an engine in a worker process of the cluster."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import attrs

from llamacli.generation.drafters import MTP
from llamacli.sampling import SamplingParams
from llamacli.serve.compilers import Compilers
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import InternalError
from llamacli.serve.http.constraints import chain
from llamacli.serve.http.errors import as_serve_error
from llamacli.serve.http.local import version
from llamacli.serve.models import LoadedModel, ModelSource
from llamacli.serve.ray.blocks import ChainCache
from llamacli.serve.ray.cores import CoreLock
from llamacli.serve.ray.errors import MismatchError
from llamacli.serve.ray.messages import Hello, Report, Route, Setup, salt_of
from llamacli.serve.ray.policy import OUTPUT_TOKENS, Load
from llamacli.serve.requests import Event, Failed, GenerationRequest, ModelInfo, Request
from llamacli.serve.settings import EngineSettings
from llamacli.serve.streams import EventStream

BEAT_S = 5.0
"""Seconds between signs of life, in both directions."""
SILENCE_S = 30.0
"""Seconds of silence after which the other side counts as lost."""
RECENT_S = 15.0
"""Seconds for which a call is named in reports."""

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Open:
    stream: EventStream
    since: float


class Replica:
    """Engine with one model, for ingresses elsewhere.

    Ray Serve makes one for each worker process (`llamacli.serve.ray.deployment`). The calls of an ingress that has
    given no sign of life for SILENCE_S end.
    """

    def __init__(self, setup: Setup, name: str):
        """Load the model; MismatchError for another node's, and errors of `load_model`."""
        self._setup, self._name = setup, name
        self._cores = CoreLock(int(setup.cpus)) if setup.cpus >= 1 else None
        if self._cores is not None:
            self._cores.pin()
        settings = EngineSettings(**setup.settings)
        adapters = tuple((Path(path), 1.0) for path, _ in setup.adapters)
        mmproj = None if setup.mmproj is None else Path(setup.mmproj[0])
        source = ModelSource(setup.name, Path(setup.path), (), adapters, MTP if setup.mtp else None, mmproj)
        self._engine = LocalEngine([source], settings)
        try:
            for path, digest in (*setup.adapters, *filter(None, [setup.mmproj])):
                if file_digest(Path(path)) != digest:
                    what = "adapter" if (path, digest) in setup.adapters else "encoder"
                    raise MismatchError(f"{path}: this node has another {what} than the ingress, of the same name")
            self._loaded: LoadedModel = self._engine.load(setup.name).result()
            if self._loaded.model.identity != setup.identity:
                raise MismatchError(f"{setup.path}: this node has another file than the ingress, of the same name")
        except BaseException:
            self._engine.close()
            raise
        self._compilers = Compilers()
        self._chains, self._salts = ChainCache(), dict[str, bytes]()
        self._open: dict[str, _Open] = {}
        self._heard: dict[str, float] = {}
        self._received: dict[str, float] = {}
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, request: Request, route: Route) -> AsyncIterator[Hello | list[Event]]:
        """Run a request: this replica's name, then its events.

        An empty list after BEAT_S of silence. Errors of the request are events.
        """
        now = time.monotonic()
        self._received[route.call] = self._heard[route.call.partition("/")[0]] = now
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_ingresses())
        yield Hello(self._name)
        try:
            stream = self._engine.submit(await self._prepared(request))
            if request.adapters:
                self._salts[self._loaded.scheduler.adapters_key(request)] = salt_of(request)
        except Exception as error:
            yield [Failed(as_serve_error(error, request.id))]
            return
        self._open[route.call] = _Open(stream, now)
        try:
            while not stream.exhausted:
                yield await stream.take(BEAT_S)
        finally:
            stream.cancel()
            self._open.pop(route.call, None)

    async def beat(self, ingress: str, calls: Sequence[str], _: Route) -> None:
        """Note a sign of life of an ingress, end dropped calls."""
        now = time.monotonic()
        self._heard[ingress] = now
        for call, one in list(self._open.items()):
            if call.startswith(f"{ingress}/") and call not in calls and now - one.since > 2 * BEAT_S:
                _log.warning("call %s is not known to its ingress any more: it ends", call)
                one.stream.cancel()

    async def describe(self, _: Route) -> tuple[ModelInfo, Setup]:
        """The loaded model, and the settings of this replica."""
        return self._loaded.info, self._setup

    def record_routing_stats(self) -> dict[str, bytes]:
        """Report for routers; called by Ray Serve."""
        return {"report": pickle.dumps(self.report())}

    def report(self) -> Report:
        """Present state."""
        oldest = time.monotonic() - RECENT_S
        self._received = {call: at for call, at in self._received.items() if at > oldest}
        stats, scheduler = self._engine.stats(), self._loaded.scheduler
        numbers = stats.models[self._setup.name]
        cost, texts = scheduler.cost, numbers.histograms["output_tokens"]
        measured = cost.per_row > 0
        load = Load(
            running=numbers.running,
            waiting=numbers.waiting,
            slots=scheduler.capacity,
            tokens=scheduler.prompt_tokens_left,
            base_s=cost.base if measured else None,
            row_s=cost.per_row if measured else None,
            output=texts.sum / sum(texts.counts) if sum(texts.counts) else OUTPUT_TOKENS,
            blocks=frozenset(self._chains.held(scheduler.memory.prefixes.sequences(), self._salts)),
        )
        return Report(load, tuple(self._received), stats.status, numbers, stats.loads[self._setup.name])

    async def check_health(self) -> None:
        """Raise InternalError if the engine is stuck; called by Ray Serve."""
        if self._engine.stats().status == "stuck":
            raise InternalError(f"the engine of replica {self._name} does not advance")

    def close(self) -> None:
        """End the engine and give the cores back."""
        self._compilers.close()
        self._engine.close()
        if self._cores is not None:
            self._cores.close()

    async def _prepared(self, request: Request) -> Request:
        if not isinstance(request, GenerationRequest) or not isinstance(request.params, SamplingParams):
            return request
        params = request.params
        if params.grammar is None and params.json_schema is None:
            return request
        compiled = await self._compilers.run(request.key, chain, self._loaded.model, params)
        return attrs.evolve(request, params=compiled)

    async def _watch_ingresses(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            oldest = time.monotonic() - SILENCE_S
            lost = {name for name, at in self._heard.items() if at < oldest}
            for call, one in list(self._open.items()):
                if call.partition("/")[0] in lost:
                    _log.warning("call %s ends: nothing was heard of its ingress for %g seconds", call, SILENCE_S)
                    one.stream.cancel()
            for name in lost:
                del self._heard[name]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expect_version(wanted: str) -> None:
    """Refuse another version than the ingress has. Raises MismatchError."""
    if version() != wanted:
        raise MismatchError(f"this node has llamacli {version()}, the ingress {wanted}: install one version everywhere")

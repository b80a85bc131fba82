"""Fake engine for tests of the HTTP layer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from llamacli.serve import requests
from llamacli.serve.engine import LocalPin
from llamacli.serve.errors import NotSupportedError, ServeError, ShuttingDownError, UnknownModelError
from llamacli.serve.metrics import EngineStats, ModelStats
from llamacli.serve.streams import EventStream

if TYPE_CHECKING:
    from llamacli.model import Model

Script = Callable[[requests.Request], Sequence[requests.Event | ServeError]]
"""Events of a request; an error first is raised by `submit`."""


def words(request: requests.Request) -> list[requests.Event | ServeError]:
    """Events of the text "one two three" for each choice."""
    texts = ("one", " two", " three")
    n = request.n * len(request.prompts) if isinstance(request, requests.GenerationRequest) else 0
    n_prompt = sum(map(len, request.prompts))
    deltas = [requests.TextDelta(index, text) for text in texts for index in range(n)]
    ends = [requests.Finished(index, "stop") for index in range(n)]
    return [
        requests.Admitted(0.0),
        *deltas,
        *ends,
        requests.Done(requests.Usage(n_prompt, 0, n * len(texts)), requests.Timings(0.0, 0.1, 0.1)),
    ]


class FakeEngine:
    """Engine that plays a script for each request.

    One event follows at each turn of the event loop.

    - `requests`: all that were submitted; `cancelled`: ids of those that were cancelled; `unloaded`: names of models.
    - `added`: models that were added, by name. `kept_alive`: times that were set.
    - `pins`: those of the model that are not released.
    - `script`: may be replaced between requests.
    - `gate`: while cleared, no event follows.
    """

    def __init__(self, model: Model, name: str = "demo", script: Script = words):
        self._model, self.name, self.script = model, name, script
        self.requests: list[requests.Request] = []
        self.cancelled: list[str] = []
        self.unloaded: list[str] = []
        self.kept_alive: list[float | None] = []
        self.added: dict[str, requests.ModelSource] = {}
        self.adapters: tuple[requests.AdapterInfo, ...] = ()
        self.draining = self.closed = False
        self.status = "ok"
        self.refusal: ServeError | None = None
        self.pins: set[object] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def models(self) -> tuple[requests.ModelInfo, ...]:
        """The model, loaded."""
        config = self._model.config
        return (
            requests.ModelInfo(
                name=self.name, path="/models/demo.gguf", status="loaded", created=1_790_000_000, n_ctx=config.n_ctx,
                n_ctx_train=config.n_ctx, n_vocab=config.n_vocab, n_embd=config.n_embd, n_params=2_755_008,
                architecture=self._model.arch, file_type="Q8_0", fingerprint="llamacli-fake", adapters=self.adapters,
            ),
        )  # fmt: skip

    async def pin(self, name: str) -> LocalPin:
        """The model, or UnknownModelError."""
        self._check(name)
        pins, pin = self.pins, object()  # a later test, which begins with others, may see the release
        pins.add(pin)
        return LocalPin(self._model, lambda: pins.remove(pin))

    def unload(self, name: str) -> None:
        """Note the name in `unloaded`."""
        self._check(name)
        self.unloaded.append(name)

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Note the seconds in `kept_alive`."""
        self._check(name)
        self.kept_alive.append(seconds)

    def set_adapters(self, name: str, scales: requests.AdapterScales) -> None:
        """Set the scales of `adapters`."""
        self._check(name)
        self.adapters = tuple(attrs.evolve(one, scale=dict(scales).get(one.id, 0.0)) for one in self.adapters)

    def add(self, source: requests.ModelSource) -> None:
        """Note the source in `added`."""
        self.added[source.name] = source

    def offer(self, sources: Sequence[requests.ModelSource]) -> None:
        """Put the sources into `added`."""
        self.added = {source.name: source for source in sources}

    def remove(self, name: str) -> None:
        """Remove a source from `added`, or raise UnknownModelError."""
        if self.added.pop(name, None) is None:
            raise UnknownModelError(f"the model {name!r} does not exist")

    def slots(self, name: str) -> requests.Slots:
        """Raise NotSupportedError."""
        raise NotSupportedError("a fake engine has no slots")

    def expect_room(self) -> None:
        """Raise `refusal`, if it is set."""
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: requests.Request) -> EventStream:
        """Play the script."""
        self._check(request.model)
        if self.draining:
            raise ShuttingDownError("the server is shutting down", retry_after=1)
        events = list(self.script(request))
        if isinstance(events[0], ServeError):
            raise events[0]
        self.requests.append(request)
        stream = EventStream(request.id, self.cancelled.append)
        task = asyncio.get_running_loop().create_task(self._play(stream, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def stats(self) -> EngineStats:
        """The number of running requests."""
        status = "draining" if self.draining else self.status
        return EngineStats(status, {self.name: ModelStats(running=len(self._tasks))})

    async def drain(self, timeout: float) -> None:
        """Wait for the scripts to end."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    def close(self) -> None:
        """End all scripts."""
        self.closed = True
        for task in self._tasks:
            task.cancel()

    def _check(self, name: str) -> None:
        if name != self.name:
            raise UnknownModelError(f"the model {name!r} does not exist: the server has {self.name!r}")

    async def _play(self, stream: EventStream, events: Iterable[requests.Event | ServeError]) -> None:
        for event in events:
            await self.gate.wait()
            await asyncio.sleep(0)
            if stream.id in self.cancelled:
                return
            stream.put([requests.Failed(event) if isinstance(event, ServeError) else event])

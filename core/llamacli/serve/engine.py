"""Engine thread, which runs the schedulers of all models."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import logging
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import attrs

from llamacli.errors import FileChangedError, InvalidRequestError, LlamaCliError, StageError
from llamacli.model import Model, load_model
from llamacli.serve import models as served
from llamacli.serve import residency
from llamacli.serve.errors import (
    InternalError,
    LoadingError,
    ServeError,
    ShuttingDownError,
    StageLostError,
    UnknownModelError,
)
from llamacli.serve.metrics import EngineStats
from llamacli.serve.models import Entry, Load, LoadedModel, ModelSource
from llamacli.serve.requests import AdapterScales, Event, ModelInfo, Request, Slots
from llamacli.serve.sampling_pool import SamplingPool
from llamacli.serve.sequences import RequestState
from llamacli.serve.settings import EngineSettings
from llamacli.serve.streams import EventStream
from llamacli.util.system import usable_cores

_log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.001
"""Seconds after which Python's threads change; by default the engine's would wait 5 ms after each call."""

_IDLE = 1.0
"""Seconds between looks for idle models."""
_POLL = 0.01
_RETRY = 5


@attrs.frozen(eq=False)
class _Target:
    """Where the events of a request go."""

    stream: EventStream
    loop: asyncio.AbstractEventLoop


class LocalPin:
    """Pin of a model; see `llamacli.serve.requests.Pin`."""

    def __init__(self, model: Model, release: Callable[[], None]):
        self.model = model
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """See Pin."""
        release, self._release = self._release, None
        if release is not None:
            release()


class LocalEngine:
    """Engine in a thread of this process; see `llamacli.serve.requests.Engine`.

    One thread computes, whatever the number of models, which take turns by time. Models are loaded by another, when
    they are first asked for; to have room, the model that was not used for longest is unloaded, if it is idle.
    """

    def __init__(self, sources: Sequence[ModelSource], settings: EngineSettings, load: Load = load_model):
        self.settings, self._load = settings, load
        self._entries = {source.name: Entry(source) for source in sources}
        self._names = {alias: source.name for source in sources for alias in (source.name, *source.aliases)}
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loader = ThreadPoolExecutor(1, "llamacli-load")
        self._sampling = SamplingPool(settings.threads or usable_cores().threads)
        self._draining = self._stopping = False
        self._stopped = threading.Event()
        self._drain_until = float("inf")
        self._stepped_at, self._reported = time.monotonic(), False
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._thread = threading.Thread(target=self._run, name="llamacli-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="llamacli-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    # --- from the event loop

    def models(self) -> tuple[ModelInfo, ...]:
        """See Engine."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if not entry.removed]
        return tuple(entry.info for entry in entries)

    async def pin(self, name: str) -> LocalPin:
        """See Engine."""
        with self._lock:
            entry = self._entry(name)
            if residency.gives_way(entry, self._entries.values(), time.monotonic()):
                raise LoadingError(f"the model {name!r} makes room for another", retry_after=_RETRY)
            entry.n_pins += 1  # before the load ends, after which nothing keeps the model
        release = functools.partial(self._unpin, entry)
        try:
            return LocalPin((await self._loaded_within(entry)).model, release)
        except BaseException:
            release()
            raise

    def add(self, source: ModelSource) -> None:
        """See Engine."""
        with self._lock:
            if (name := self._names.get(source.name)) is not None:
                self._retire(name)
            self._entries[source.name] = Entry(source)
            self._names |= dict.fromkeys((source.name, *source.aliases), source.name)

    def offer(self, sources: Sequence[ModelSource]) -> None:
        """See Engine."""
        wanted = {source.name: source for source in sources}
        with self._lock:
            offered = {entry.source.name: entry for entry in self._entries.values() if not entry.removed}
            for name, entry in offered.items():
                if not (entry.is_fixed or name in wanted):
                    self._retire(name)
            for name, source in wanted.items():
                if name not in offered or not (offered[name].is_fixed or offered[name].source == source):
                    self.add(source)

    def remove(self, name: str) -> None:
        """See Engine."""
        with self._lock:
            self._entry(name)
            self._retire(self._names[name])

    def _retire(self, name: str) -> None:
        """Take a model's name; the model is unloaded once idle."""
        entry = self._entries[name]
        if entry.is_fixed:
            raise InvalidRequestError(f"the model {name!r} was named when the server was started")
        entry.removed = True
        self._names = {alias: known for alias, known in self._names.items() if known != name}
        del self._entries[name]
        self._entries[f"{name} removed {id(entry)}"] = entry

    def unload(self, name: str) -> None:
        """See Engine."""
        self._command(functools.partial(self._unload, self._entry(name)))

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """See Engine."""
        self._entry(name).keep_alive = seconds
        with self._wake:
            self._wake.notify_all()

    def set_adapters(self, name: str, scales: AdapterScales) -> None:
        """See Engine."""
        self._entry(name).set_adapters(scales)

    def slots(self, name: str) -> Slots:
        """See Engine."""
        loaded = self._entry(name).loaded
        if loaded is None:
            raise LoadingError(f"the model {name!r} is not loaded", retry_after=_RETRY)
        return loaded.scheduler.slots

    def expect_room(self) -> None:
        """See Engine; with several models only `submit` knows the queue."""
        loaded = self._loaded()
        if len(self._entries) == 1 and loaded:
            loaded[0].scheduler.expect_room()

    def submit(self, request: Request) -> EventStream:
        """See Engine."""
        with self._lock:
            entry = self._entry(request.model)
            if self._draining or self._stopping:
                raise ShuttingDownError("the server is shutting down", retry_after=_RETRY)
            if entry.loaded is None:
                self._begin_load(entry)
                raise LoadingError(f"the model {request.model!r} is being loaded", retry_after=_RETRY)
            scheduler = entry.loaded.scheduler
            entry.n_pins += 1  # it is not unloaded before the request is in its queue
        stream = EventStream(request.id)
        try:
            if not self._is_busy():
                self._stepped_at = time.monotonic()  # the watchdog's time begins with the work
            state = scheduler.submit(request, _Target(stream, asyncio.get_running_loop()))
        finally:
            self._unpin(entry)

        def cancel(_: str) -> None:
            scheduler.cancel(state)
            with self._wake:
                self._wake.notify_all()

        def end_reasoning() -> None:
            state.ends_reasoning = True

        stream.on_cancel, stream.on_end_reasoning = cancel, end_reasoning
        return stream

    def stats(self) -> EngineStats:
        """See Engine."""
        entries = [entry for _, entry in self._items()]
        loaded = {entry.source.name: entry.loaded for entry in entries if entry.loaded}
        asleep = {entry.source.name: entry.counters for entry in entries if entry.counters and not entry.loaded}
        if self._draining or self._stopping:
            status = "draining"
        elif self._is_stuck():
            status = "stuck"
        else:
            status = _state([entry for entry in entries if not entry.removed])
        stats = {name: one.scheduler.stats() for name, one in loaded.items()}
        return EngineStats(
            status,
            stats | {name: counters.snapshot() for name, counters in asleep.items()},
            {entry.source.name: entry.load_stats for entry in entries if not entry.removed},
        )

    async def drain(self, timeout: float) -> None:
        """See Engine."""
        error = ShuttingDownError("the server is shutting down", retry_after=_RETRY)
        self._draining = True
        self._drain_until = min(self._drain_until, time.monotonic() + timeout)
        self._command(lambda: self._fail_all(error, waiting_only=True))
        while self._is_busy() and time.monotonic() < self._drain_until:
            await asyncio.sleep(_POLL)
        ended = asyncio.wrap_future(self._command(lambda: self._fail_all(error)))
        await asyncio.wait([ended], timeout=self.settings.stuck_after)  # an engine that is stuck must not hold the exit

    # --- from any thread

    def load(self, name: str) -> Future[LoadedModel]:
        """Load a model unless it is loaded; its future.

        Raises UnknownModelError. The future raises what `load_model` raises, and LoadingError if no other model can be
        unloaded to have room.
        """
        return self._begin_load(self._entry(name))

    def close(self) -> None:
        """See Engine."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify_all()
        self._loader.shutdown(cancel_futures=True)
        self._thread.join()
        self._stopped.set()
        self._watchdog.join()
        for entry in self._entries.values():
            loaded, entry.loaded = entry.loaded, None
            if loaded is not None:
                loaded.close()
        self._sampling.close()
        sys.setswitchinterval(self._interval)

    def _begin_load(self, entry: Entry) -> Future[LoadedModel]:
        """Load a model as `load` does, also one that was replaced meanwhile."""
        with self._lock:
            entry.touched_at = time.monotonic()
            if entry.loaded is not None:
                done: Future[LoadedModel] = Future()
                done.set_result(entry.loaded)
                return done
            if entry.loading is None:
                entry.loading = self._loader.submit(self._load_entry, entry)
            return entry.loading

    async def _loaded_within(self, entry: Entry) -> LoadedModel:
        """Loaded model, after `load_timeout` at the latest."""
        name = entry.source.name
        future = asyncio.wrap_future(self._begin_load(entry))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if the client has left
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.settings.load_timeout)
        except TimeoutError:
            raise LoadingError(f"the model {name!r} is being loaded", retry_after=_RETRY) from None
        except ServeError:
            raise
        except (LlamaCliError, MemoryError, OSError) as error:
            _log.error("the model %r cannot be loaded", name, exc_info=error)
            raise InternalError(f"the model {name!r} cannot be loaded: {_reason(error)}") from error

    def _unpin(self, entry: Entry) -> None:
        with self._wake:
            entry.n_pins -= 1
            entry.touched_at = time.monotonic()
            self._wake.notify_all()

    def _entry(self, name: str) -> Entry:
        with self._lock:
            found = self._names.get(name)
            if found is None:
                offered = ", ".join(one.source.name for one in self._entries.values() if not one.removed)
                raise UnknownModelError(f"the model {name!r} does not exist: the server has {offered}")
            return self._entries[found]

    def _command(self, command: Callable[[], None]) -> Future[None]:
        """Call a function in the engine's thread before its next step."""
        done: Future[None] = Future()

        def run() -> None:
            command()
            done.set_result(None)

        self._commands.put(run)
        with self._wake:
            self._wake.notify_all()
        return done

    def _is_busy(self) -> bool:
        return any(one.scheduler.busy for one in self._loaded())

    def _loaded(self) -> list[LoadedModel]:
        return [loaded for _, entry in self._items() if (loaded := entry.loaded)]

    def _items(self) -> list[tuple[str, Entry]]:
        with self._lock:
            return list(self._entries.items())

    def _is_stuck(self) -> bool:
        return self._is_busy() and time.monotonic() - self._stepped_at > self.settings.stuck_after

    # --- the loader's thread

    def _load_entry(self, entry: Entry) -> LoadedModel:
        try:
            self._make_room(entry)
            started = time.monotonic()
            loaded = served.load(entry.source, self.settings, self._load, self._sampling, entry.counters)
            _log.info("model %s loaded in %.1f seconds", entry.source.name, time.monotonic() - started)
            with self._wake:
                busy = [one.used for one in self._loaded() if one.scheduler.busy]
                loaded.used = max(busy, default=0.0)
                entry.loaded, entry.sleeps, entry.has_lost, entry.failure = loaded, False, False, ""
                entry.touched_at = entry.loaded_at = time.monotonic()
                entry.n_loads += 1
                entry.counters = loaded.scheduler.counters
            return loaded
        except (LlamaCliError, MemoryError, OSError) as error:
            if not isinstance(error, LoadingError):
                entry.failure, entry.n_failures = _reason(error), entry.n_failures + 1
            raise
        finally:
            with self._lock:  # `load` holds it until the future is set
                entry.loading = None

    def _make_room(self, entry: Entry) -> None:
        """Unload idle models, the least recently used first, for one more.

        Raises ModelTooLargeError, and LoadingError while all are in use.
        """
        while True:
            with self._lock:
                loaded = [one for one in self._entries.values() if one.loaded]
                residency.expect_fit(entry, loaded, self.settings)
                if residency.has_room(entry, loaded, self.settings):
                    entry.waits_since = None
                    return
                oldest = residency.least_recently_used(loaded)
                if oldest is None:
                    entry.waits_since = entry.waits_since or time.monotonic()
                    raise LoadingError("all models that fit are in use", retry_after=_RETRY)
            done = self._command(functools.partial(self._unload, oldest))
            while not wait([done], _IDLE).done:
                if self._stopping:
                    raise ShuttingDownError("the server is shutting down")

    # --- the engine's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._commands.empty() and not self._is_busy() and not self._stopping:
                    limits = [entry.idle_limit(self.settings.idle_unload) for entry in self._entries.values()]
                    self._wake.wait(min(_IDLE, max(_POLL, min(limits, default=_IDLE) / 4)))
                if self._stopping:
                    break
            while not self._commands.empty():
                self._commands.get()()
            self._unload_idle()
            busy = [one for one in self._loaded() if one.scheduler.busy]
            if not busy:
                offered = [one for _, entry in self._items() if (one := entry.loaded) and not entry.removed]
                busy = [one for one in offered if one.scheduler.has_lost]
            busy = [one for one in busy if one.scheduler.has_clients] or busy
            if busy:
                self._step(min(busy, key=lambda one: one.used), busy)
        while not self._commands.empty():
            self._commands.get()()
        self._fail_all(ShuttingDownError("the server is shutting down"))

    def _step(self, loaded: LoadedModel, busy: Sequence[LoadedModel]) -> None:
        # A model that was idle has no claim on the time that others used meanwhile.
        floor = min((one.used for one in busy if one.scheduler.n_running), default=loaded.used)
        started = time.monotonic()
        try:
            events = loaded.scheduler.step()
        except (FileChangedError, StageError) as error:
            message = str(error)  # handlers may keep what is logged, and the error refers to the weights
            _log.error("the model %r is loaded again: %s", loaded.info.name, message)
            self._renew(loaded, has_lost=isinstance(error, StageError))
            lost = StageLostError if isinstance(error, StageError) else LoadingError
            reason = f"a part of the model is lost, try again: {_reason(error)}"
            events = loaded.scheduler.fail(lost(reason, retry_after=_RETRY))
        except Exception as error:
            _log.critical("a step failed", exc_info=error)
            events = loaded.scheduler.fail(InternalError("the engine failed: the server's log says why"))
        now = time.monotonic()
        loaded.used = max(loaded.used, floor) + now - started
        self._stepped_at, self._reported = now, False
        _deliver(events)

    def _renew(self, lost: LoadedModel, *, has_lost: bool) -> None:
        """Have the next request load a model again.

        This one goes once no call needs it. One that `has_lost` a pipeline stage is loaded without a request, too:
        clients that look at the server's state send none.
        """
        with self._lock:
            for name, entry in list(self._entries.items()):
                if entry.loaded is lost and not entry.removed:
                    entry.removed = True
                    fresh = attrs.evolve(
                        entry, loaded=None, loading=None, n_pins=0, waits_since=None, removed=False, sleeps=False,
                        has_lost=has_lost, touched_at=time.monotonic(),
                    )  # fmt: skip
                    fresh.adapters = entry.adapters
                    others = {key: fresh if key == name else one for key, one in self._entries.items()}
                    self._entries = others | {f"{name} removed {id(entry)}": entry}

    def _fail_all(self, error: ServeError, *, waiting_only: bool = False) -> None:
        for loaded in self._loaded():
            _deliver(loaded.scheduler.fail(error, waiting_only=waiting_only))

    def _unload_idle(self) -> None:
        for key, entry in [(key, entry) for key, entry in self._items() if entry.removed and not entry.in_use]:
            self._unload(entry)
            with self._lock:
                is_gone = entry.loaded is None and entry.loading is None
                if is_gone and self._entries.get(key) is entry:  # another may have taken its name meanwhile
                    del self._entries[key]
        now = time.monotonic()
        for _, entry in self._items():
            if entry.loaded and entry.in_use:
                entry.touched_at = now
            elif entry.loaded and now - entry.touched_at > entry.idle_limit(self.settings.idle_unload):
                self._unload(entry)
                entry.sleeps = entry.loaded is None
            elif entry.has_lost and not (entry.loading or self._draining) and now - entry.touched_at > _RETRY:
                self.load(entry.source.name)

    def _unload(self, entry: Entry) -> None:
        """Unload a model if it is idle."""
        with self._lock:
            loaded = entry.loaded
            if loaded is None or entry.in_use:
                return
            entry.loaded = None
        loaded.close()
        if entry.removed:
            gc.collect()  # the error of a step that failed refers to the weights in a cycle
        _log.info("model %s unloaded", entry.source.name)

    # --- the watchdog's thread

    def _watch(self) -> None:
        """Log the engine thread's stack once it is stuck."""
        while not self._stopping:
            if self._is_stuck() and not self._reported:
                self._reported = True
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else "the thread has ended\n"
                _log.critical("no step for %g seconds; the engine is at\n%s", self.settings.stuck_after, stack)
            self._stopped.wait(min(_IDLE, max(_POLL, self.settings.stuck_after / 4)))


def _state(entries: Sequence[Entry]) -> str:
    """State of the models, see EngineStats."""
    loaded = [entry.loaded for entry in entries if entry.loaded]
    if any(not one.scheduler.has_lost for one in loaded):
        return "ok"
    if loaded or any(entry.has_lost for entry in entries):
        return "stage_lost"
    return "loading" if any(entry.loading for entry in entries) else "ok"


def _reason(error: BaseException) -> str:
    """Message of an error, without the folders of files."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {Path(error.filename).name}" if error.filename else error.strerror
    return re.sub(r"(?<![\w.])/(?:[^\s:]+/)+", "", str(error)) or type(error).__name__


def _deliver(events: Sequence[tuple[RequestState, Event]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, dict[EventStream, list[Event]]] = collections.defaultdict(dict)
    for state, event in events:
        target: _Target = state.target
        by_loop[target.loop].setdefault(target.stream, []).append(event)
    for loop, streams in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, streams)
        except RuntimeError:  # the loop is closed: nobody reads any more
            _log.debug("events of %d requests have no reader", len(streams))


def _put(streams: dict[EventStream, list[Event]]) -> None:
    for stream, events in streams.items():
        stream.put(events)

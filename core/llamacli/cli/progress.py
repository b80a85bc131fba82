"""Progress bars and spinners on a terminal; nothing in pipes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llamacli.cli.hub import resolve_model
from llamacli.cli.output import has_status, human_bytes, human_duration, status

if TYPE_CHECKING:
    from llamacli import Model, Session
    from llamacli.engine.heads import Head
    from llamacli.stages.link import Workers

Item = TypeVar("Item")

_DELAY_S, _INTERVAL_S = 0.3, 0.2
"""Seconds before the status line appears, and between two updates of it."""

_MIN_S = 0.5
"""Seconds from which on a rate is measured well enough for an estimate of the time left."""

MIN_ADDRESS_SPACE = 400 << 20
"""Bytes of the address space with Python, the libraries and their threads in it, before a model is loaded."""

_WIDTH = 16
_SPINNER = "|/-\\"

Progress = Callable[[int, int], None]


class Task:
    """Task whose progress is shown, with its status line as text.

    Between two reports progress is interpolated by the mean rate. `rate` is that to begin with, in units per second, if
    one is known. `show` formats a number of units, whose name is `unit`. `detail` replaces the label until the next
    report.

    Where the task tells its progress within `step` units that follow a report, `share` returns it, 0 to 1.
    """

    def __init__(
        self,
        label: str,
        show: Callable[[int], str] = str,
        *,
        unit: str = "",
        rate: float = 0.0,
        step: int = 0,
        share: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label, self.detail = label, ""
        self._show, self._unit, self._rate, self._clock = show, unit, rate, clock
        self._size, self._share = step, share
        self._done = self._step = self._total = 0
        self._started = self._reported = clock()
        self._frames = itertools.cycle(_SPINNER)

    def report(self, done: int, total: int) -> None:
        """Set the units done and those in all."""
        now, self.detail = self._clock(), ""
        if total != self._total or done < self._done:
            self._started, self._done = now, 0
        elapsed = now - self._started
        if done and elapsed >= _MIN_S:
            self._rate = done / elapsed
        self._step, self._done, self._total, self._reported = done - self._done, done, total, now

    def line(self) -> str:
        """Status line of this moment."""
        frame, now = next(self._frames), self._clock()
        if self.detail:
            return f"{frame} {self.detail}"
        elapsed, within = now - self._started, self._share()
        if self._done >= self._total:
            if not within:
                return f"{frame} {self.label}, {human_duration(elapsed)}"
            return f"{frame} {self.label} {_bar(within, elapsed / within * (1 - within))}"
        if within:
            done = self._done + within * min(self._size, self._total - self._done)
            rate = done / elapsed if elapsed >= _MIN_S else self._rate
        else:
            done, rate = self._done + (now - self._reported) * self._rate, self._rate
            if self._step:  # not beyond the next report, which is about a step away
                done = min(done, self._done + 0.95 * self._step)
        done = min(done, 0.99 * self._total)
        counts = f"{self._show(int(done))} of {self._show(self._total)}{self._unit}"
        return (
            f"{frame} {self.label} {_bar(done / self._total, (self._total - done) / rate if rate else None)}  {counts}"
        )


def _bar(share: float, left_s: float | None) -> str:
    filled = "#" * int(_WIDTH * share)
    left = "..." if left_s is None else f"{human_duration(left_s)} left"
    return f"[{filled:.<{_WIDTH}}] {int(100 * share):3} %  {left}"


@contextlib.contextmanager
def shown(task: Task, interval_s: float | None = None, *, compiles: bool = True) -> Iterator[Callable[[], None]]:
    """Show a task in the status line, which a thread updates.

    The context is a function that removes it for good. With `compiles`, kernels are named while they are compiled; that
    imports Numba.
    """
    if not has_status():
        yield lambda: None
        return
    ended = threading.Event()

    def update() -> None:
        if not ended.wait(_DELAY_S):
            status(task.line())
            while not ended.wait(interval_s or _INTERVAL_S):
                status(task.line())

    thread = threading.Thread(target=update, name="llamacli-status", daemon=True)
    thread.start()

    def end() -> None:
        if not ended.is_set():
            ended.set()
            thread.join()
            status("")

    try:
        with _compiling(task) if compiles else contextlib.nullcontext():
            yield end
    finally:
        end()


@contextlib.contextmanager
def bar(label: str, show: Callable[[int], str] = str, *, unit: str = "") -> Iterator[Progress]:
    """Show a progress bar (see `Task`), updated by calls of (done, total)."""
    task = Task(label, show, unit=unit)
    with shown(task):
        yield task.report


@contextlib.contextmanager
def working(label: str) -> Iterator[None]:
    """Show a spinner and the seconds, for work that compiles no kernels."""
    with shown(Task(label), compiles=False):
        yield


class Waiting:
    """Status line of a session until its first token."""

    def __init__(self, task: Task, end: Callable[[], None]):
        self._task, self._end = task, end

    def watch(self, items: Iterable[Item], *, quiet: bool = False) -> Iterator[Item]:
        """Iterate, without the status line from the first item on.

        With `quiet` nothing is written meanwhile, so the line stays and counts the items.
        """
        rest = iter(items)
        return self._counted(rest) if quiet else itertools.chain(self._first(rest), rest)

    def _first(self, items: Iterator[Item]) -> Iterator[Item]:
        for item in items:
            self._end()
            yield item
            return
        self._end()

    def _counted(self, items: Iterator[Item]) -> Iterator[Item]:
        for n, item in enumerate(items, start=1):
            self._task.report(0, 0)
            self._task.label = f"writing, {n} tokens"
            yield item
        self._end()


@contextlib.contextmanager
def waiting(session: Session) -> Iterator[Waiting]:
    """Show the reading of a prompt until the first token comes."""
    from llamacli.kv import N_BATCH

    timings = session.model.program.timings
    task = Task(
        "reading the prompt", unit=" tokens", rate=session.stats.prefill_tps, step=N_BATCH,
        share=lambda: timings.batch_share,
    )  # fmt: skip
    with shown(task) as end:
        before, session.progress = session.progress, task.report
        try:
            yield Waiting(task, end)
        finally:
            session.progress = before


def load(
    path: str,
    mode: str,
    threads: int | None,
    lora: Sequence[tuple[str, float]] = (),
    load_mode: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    mmproj: str | None = None,
    prompts: str = "registers",
    workers: Workers | None = None,
) -> Model:
    """Load a model by file or short name, with a progress bar.

    `lora` are files of adapters with their scales; `load_mode` is `load` of `load_model`.
    """
    path = resolve_model(path)
    _expect_address_space()
    with bar(f"loading {Path(path).name}", human_bytes) as progress:
        from llamacli import load_model
        from llamacli.kernels.helper import start_helper

        start_helper()
        engine = None if workers is None else workers.engine(threads, load_mode)
        return load_model(
            path, mode, threads=threads, progress=progress, lora_path=[file for file, _ in lora],
            lora_scale=[scale for _, scale in lora], load="auto" if engine else load_mode, overrides=overrides,
            mmproj=mmproj, engine=engine, prompts=prompts,
        )  # fmt: skip


def _expect_address_space() -> None:
    """Raise MemoryError in an address space without room for libraries.

    Python's import fails by any error there, LLVM ends the process, and a thread that cannot start is waited for.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        asked = human_bytes(MIN_ADDRESS_SPACE)
        raise MemoryError(f"the address space is limited to {human_bytes(limit)}; {asked} and the model are needed")


def load_draft(model: Model, path: str, mode: str, threads: int | None) -> Model | Head:
    """Load a draft model or draft head, with a progress bar."""
    path = resolve_model(path)
    with bar(f"loading {Path(path).name}", human_bytes) as progress:
        return model.load_draft(path, mode, threads=threads, progress=progress)


@contextlib.contextmanager
def _compiling(task: Task) -> Iterator[None]:
    from llamacli.kernels import jit

    numbers = itertools.count(1)

    def show(name: str) -> None:
        task.detail = f"compiling kernel {next(numbers)}: {name} (once for this CPU)"
        status(task.line())

    jit.listeners.append(show)
    try:
        yield
    finally:
        jit.listeners.remove(show)

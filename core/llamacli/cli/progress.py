"""What a terminal shows while something takes long. Nothing of it goes into a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamacli.cli.output import has_status, human_bytes, status

if TYPE_CHECKING:
    from llamacli import Model

_PATIENCE_S, _PAUSE_S = 0.3, 0.05
"""What is done sooner is not worth a bar; one is drawn anew no sooner than this."""

_WIDTH = 24

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def bar(label: str, show: Callable[[int], str] = str) -> Iterator[Progress]:
    """Give a function to call with how much is done and how much there is; `show` says what such a number means."""
    if not has_status():
        yield lambda done, total: None
        return
    drawn = time.monotonic() + _PATIENCE_S - _PAUSE_S

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        if done >= total:
            status("")
        elif time.monotonic() - drawn >= _PAUSE_S:
            drawn = time.monotonic()
            filled = _WIDTH * done // max(1, total)
            part = f"{100 * done // max(1, total):3} %"
            status(f"{label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {part}  {show(done)} of {show(total)}")

    try:
        yield draw
    finally:
        status("")


def load(path: str, mode: str, threads: int | None) -> Model:
    """Load a model, showing a bar of its bytes, and the kernels that are compiled on the way."""
    from llamacli import load_model

    with bar(f"loading {Path(path).name}", human_bytes) as progress, compiling():
        return load_model(path, mode, threads=threads, progress=progress)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Show the name of each kernel that is compiled, for as long as that takes."""
    if not has_status():
        yield
        return
    from llamacli.kernels import jit

    n_compiled = 0

    def show(name: str) -> None:
        nonlocal n_compiled
        n_compiled += 1
        status(f"compiling kernel {n_compiled}: {name}")

    jit.listeners.append(show)
    try:
        yield
    finally:
        jit.listeners.remove(show)
        status("")

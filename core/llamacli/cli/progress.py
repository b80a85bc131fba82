"""Progress bars on a terminal; nothing is written to pipes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamacli.cli.output import has_status, human_bytes, status

if TYPE_CHECKING:
    from llamacli import Model

_DELAY_S, _INTERVAL_S = 0.3, 0.05
"""Seconds before a bar appears, and between two updates of it."""

_WIDTH = 24

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def bar(label: str, show: Callable[[int], str] = str) -> Iterator[Progress]:
    """Show a progress bar.

    The context is a function to call with (done, total), which `show` formats.
    """
    if not has_status():
        yield lambda done, total: None
        return
    drawn = time.monotonic() + _DELAY_S - _INTERVAL_S

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        if done >= total:
            status("")
        elif time.monotonic() - drawn >= _INTERVAL_S:
            drawn = time.monotonic()
            filled = _WIDTH * done // max(1, total)
            part = f"{100 * done // max(1, total):3} %"
            status(f"{label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {part}  {show(done)} of {show(total)}")

    try:
        yield draw
    finally:
        status("")


def load(path: str, mode: str, threads: int | None) -> Model:
    """Load a model, with a progress bar."""
    from llamacli import load_model

    with bar(f"loading {Path(path).name}", human_bytes) as progress, compiling():
        return load_model(path, mode, threads=threads, progress=progress)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Show the name of each kernel while it is compiled."""
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

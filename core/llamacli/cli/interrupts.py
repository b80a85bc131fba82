"""Ctrl-C, so that it is heard wherever it comes and ends the program at once.

Python forgets a KeyboardInterrupt that is raised where no exception can pass: in a destructor, in a function that C
calls. Loading kernels is full of these. And one that breaks off the import of a compiled module may leave objects
behind that the interpreter never finishes to take apart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGINT

_heard = False


def listen() -> None:
    """Remember interrupts from here on; where they are ignored, as in background jobs of scripts, they stay so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)
        sys.unraisablehook = _unraisable


def check() -> None:
    """Raise the KeyboardInterrupt that got lost, if one did."""
    if _heard:
        raise KeyboardInterrupt


def forget() -> None:
    """The interrupt has done what it was for: the program goes on."""
    global _heard
    _heard = False


def leave() -> NoReturn:
    """End the process without taking the interpreter apart."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream may be closed or None
            stream.flush()
    os._exit(EXIT_CODE)


def _hear(_signal: int, _frame: FrameType | None) -> None:
    global _heard
    _heard = True
    raise KeyboardInterrupt


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Say nothing of an interrupt that is remembered."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)

"""Handling of SIGINT (Ctrl-C) that no code can lose.

Python drops a KeyboardInterrupt that is raised where no exception can propagate: in a destructor, in a callback from C.
Loading kernels is full of these. One that breaks off the import of a compiled module may also leave objects behind that
the interpreter cannot finalize. So the handler sets a flag as well, and the process ends without finalization.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGINT

_interrupted = False


def install_handler() -> None:
    """Install the SIGINT handler, unless ignored, as in background jobs of scripts."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
        sys.unraisablehook = _unraisable


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if SIGINT has come since the last `clear`."""
    if _interrupted:
        raise KeyboardInterrupt


def clear() -> None:
    """Reset the flag once an interrupt has been handled."""
    global _interrupted
    _interrupted = False


def exit_now() -> NoReturn:
    """Flush stdout and stderr and end the process without finalizing the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream may be closed or None
            stream.flush()
    os._exit(EXIT_CODE)


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Report unraisable exceptions but KeyboardInterrupt, which the flag has kept."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)

"""Compiling kernels: when they are first needed, once for each CPU, kept on disk.

A kernel is one step of a program, run by every thread of a team at once. All have the same signature,
`(args, run, thread, n_threads)`: the addresses of a record of the step's own parameters and of a record that all steps
of a run share, this thread's number and how many there are. Each thread does its share of the work and returns.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import cfunc, types
from numba.core import config

from llamacli.kernels.isa import isa

_log = logging.getLogger(__name__)

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


def record(*integers: str, **floats: type[np.floating[Any]]) -> np.dtype[np.void]:
    """The type of a kernel's parameters: int64 fields (counts and addresses), then floats of the named types."""
    return np.dtype([*((name, np.int64) for name in integers), *floats.items()])


RUN = record("n_rows", "first_row", "n_past", "kv")
"""What all steps of a run share: rows `first_row` to `n_rows` - 1 are computed, row 0 stands at position `n_past`, and
`kv` is the address of int64 [n_layer, 2], the addresses of each layer's keys and values."""


def cache_directory() -> Path:
    """Where compiled kernels are kept: a folder of this user's, one for each state of the sources and of the CPU.

    LLAMACLI_CACHE names another folder than the system's usual one.
    """
    if "LLAMACLI_CACHE" in os.environ:
        base = Path(os.environ["LLAMACLI_CACHE"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches" / "llamacli"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamacli"
    return base / "kernels" / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    """Numba would keep a stale copy of a kernel whose callee changed in another file, so all sources count."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{numba.__version__} {llvmlite.__version__} {np.__version__} {sys.version} {isa()}".encode())
    return digest.hexdigest()[:16]


def _prepare_cache() -> Path:
    """Point Numba at the cache folder, or at one of this process's own where the folder cannot be written."""
    directory = cache_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write {directory}")
    except OSError as error:
        _log.warning("compiled kernels cannot be kept, so they are compiled anew each time: %s", error)
        temporary = tempfile.TemporaryDirectory(prefix="llamacli-kernels-")
        atexit.register(temporary.cleanup)
        directory = Path(temporary.name)
    config.CACHE_DIR = str(directory)
    return directory


# Numba decides where a function is cached when the function is decorated, so this precedes every kernel.
_DIRECTORY = _prepare_cache()


class Compiled:
    """A function that is compiled to machine code, or loaded from the cache, when it is first needed."""

    def __init__(self, function: Callable[..., Any], signature: Any, variant: str = ""):
        self._function, self._signature = function, signature
        self.name = function.__name__ + variant
        self.__doc__ = function.__doc__

    @functools.cached_property
    def _code(self) -> Any:
        marker = _DIRECTORY / f"{self.name}.done"
        if not marker.exists():
            _announce()
        try:
            code = cfunc(self._signature, cache=True)(self._function)
        except Exception as error:  # a damaged cache fails in as many ways as unpickling can
            _log.warning("the cache of compiled kernels is damaged and made anew: %s: %s", type(error).__name__, error)
            for entry in _DIRECTORY.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
            code = cfunc(self._signature, cache=True)(self._function)
        marker.touch()
        return code

    @property
    def address(self) -> int:
        """The address of the machine code."""
        return int(self._code.address)

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """What calls it from Python, without the interpreter's lock."""
        return self._code.ctypes  # type: ignore[no-any-return]


class Kernel(Compiled):
    """A step of a program; see this module's description."""

    def __init__(self, function: Callable[..., None], variant: str = ""):
        super().__init__(function, SIGNATURE, variant)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel."""
    return Kernel(function)


@functools.cache
def _announce() -> None:
    _log.warning("compiling kernels for this CPU; this happens once and takes some seconds")

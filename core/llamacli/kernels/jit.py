"""Compiling kernels: when they are first needed, once for each CPU, kept on disk.

A kernel is one step of a program, run by every thread of a team at once. All have the same signature,
`(args, run, thread, n_threads)`: the addresses of a record of the step's own parameters and of a record that all steps
of a run share, this thread's number and how many there are. Each thread does its share of the work and returns.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import shutil
import string
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import llvmlite
import numba
import numpy as np
from numba import njit, types
from numba.core import config
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from llamacli.kernels.digest import function_digest
from llamacli.kernels.isa import isa
from llamacli.kernels.switch import jit_disabled
from llamacli.util.folders import user_folder

_log = logging.getLogger(__name__)

_UNUSED_S = 30 * 24 * 3600
"""Seconds after which the kernels of another state of the sources, or of another CPU, are given up."""

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


listeners: list[Callable[[str], None]] = []
"""Each is called with the name of a kernel that is about to be compiled."""


def cache_directory() -> Path | None:
    """Where compiled kernels are kept: a folder of this user's, one for each state of the sources and of the CPU.

    LLAMACLI_CACHE names another folder than the system's usual one. None where the user has no folder.
    """
    base = os.environ.get("LLAMACLI_CACHE") or user_folder("cache")
    return Path(base) / "kernels" / _fingerprint() if base else None


def sources() -> list[Path]:
    """The modules that kernels are made from."""
    package = Path(__file__).parents[1]
    folders = ("kernels", "ops", "quantization")
    return [source for folder in folders for source in sorted((package / folder).rglob("*.py"))]


@functools.cache
def _fingerprint() -> str:
    """All sources count, and all that decides what machine code they become."""
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version, isa())
    settings = (config.OPT, config.BOUNDSCHECK)
    digest.update(repr((versions, settings, cpu_target.target_context.codegen().magic_tuple())).encode())
    return digest.hexdigest()[:16]


class _Entry:
    """One kernel's file in the cache, with the methods that a CFunc calls on a cache.

    Numba's own cache would do but for three things: its folder is a setting of the whole process, it needs that folder
    to be writable, and it believes whatever it reads. Here a checksum comes before the code.
    """

    def __init__(self, name: str):
        directory = cache_directory()
        self._name, self._path = name, directory and directory / f"{name}.kernel"

    def load_overload(self, _signature: Any, context: Any) -> CompileResult | None:
        """What was kept, or None if it has to be compiled."""
        with contextlib.suppress(OSError):
            data = self._path.read_bytes() if self._path else b""
            if data and hashlib.sha256(data[32:]).digest() == data[:32]:
                _say_used(self._path.parent)
                context.refresh()  # what code refers to must be there before it is linked
                return CompileResult._rebuild(context, *pickle.loads(data[32:]))
            if data:
                _log.warning("%s is damaged and made anew", self._path)
        _announce()
        for listener in listeners:
            listener(self._name)
        return None

    def save_overload(self, _signature: Any, result: CompileResult) -> None:
        """Keep it; where that cannot be done, it is there for this process only."""
        if self._path is None:
            _say_not_kept("this user has no home folder, and LLAMACLI_CACHE names none")
            return
        assert not result.library.has_dynamic_globals, f"{self._name} holds addresses of this process"
        try:
            code = dumps(result._reduce())
        except RuntimeError:  # an interrupt that came in LLVM's callback is forgotten, and the object code with it
            return
        written = self._path.with_suffix(f".{os.getpid()}")
        try:
            if not self._path.parent.exists():
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _prune(self._path.parent.parent)
            try:
                written.write_bytes(hashlib.sha256(code).digest() + code)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            _say_not_kept(str(error))


@functools.cache
def _say_used(folder: Path) -> None:
    """Let the folder's time be that of its last use."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def _prune(folder: Path) -> None:
    """Delete the folders in this one that have not been used for long."""
    with contextlib.suppress(OSError):
        for other in folder.iterdir():
            is_ours = len(other.name) == 16 and not set(other.name) - set(string.hexdigits)
            if is_ours and time.time() - other.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


@functools.cache
def _announce() -> None:
    _log.warning("compiling kernels for this CPU; this happens once and takes some seconds")


_said: list[str] = []


def _say_not_kept(reason: str) -> None:
    if not _said:
        _said.append(reason)
        _log.warning("compiled kernels cannot be kept, so they are compiled anew each time: %s", reason)


Code = TypeVar("Code")

_compiling = threading.RLock()
"""Held while something is compiled or loaded: the code of a second compilation would go when its owner does."""


def _run_compiler(compile_it: Callable[..., object], *arguments: object) -> None:
    """Let Numba compile. An interrupt at the wrong moment would leave its lock with this thread for ever."""
    try:
        compile_it(*arguments)
    except BaseException:
        while global_compiler_lock.is_locked():
            global_compiler_lock.release()
        raise


class _OnDemand(ABC, Generic[Code]):
    """What is compiled, or loaded from the cache, when it is first needed."""

    _code: Code | None = None

    @abstractmethod
    def _make(self) -> Code:
        """Compile or load it."""

    def compile(self) -> Code:
        """Compile or load it, if that has not been done."""
        if self._code is None:
            with _compiling:
                if self._code is None:
                    self._code = self._make()
        return self._code


class Compiled(_OnDemand[CFunc]):
    """A function as machine code. Its name and `variant` tell it from every other one."""

    def __init__(self, function: Callable[..., Any], signature: Any, variant: str = ""):
        self._function, self._signature = function, signature
        self.name = function.__name__ + variant
        self.__doc__ = function.__doc__

    def _make(self) -> CFunc:
        code = CFunc(self._function, (self._signature.args, self._signature.return_type), locals={}, options={})
        code._cache = _Entry(self.name)
        _run_compiler(code.compile)
        return code

    @property
    def address(self) -> int:
        """The address of the machine code."""
        return int(self.compile().address)

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """What calls it from Python, without the interpreter's lock."""
        return self.compile().ctypes  # type: ignore[no-any-return]


class Kernel(Compiled):
    """A step of a program; see this module's description. The name of a plugin's carries a digest of its code."""

    def __init__(self, function: Callable[..., None], variant: str = ""):
        digest = function_digest(function)
        super().__init__(function, SIGNATURE, f"{variant}_{digest}" if digest else variant)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel."""
    return Kernel(function)


class ArrayFunction(_OnDemand[Callable[..., Any]]):
    """A function of arrays that Python calls, without its lock; where NUMBA_DISABLE_JIT is set, plain Python."""

    def __init__(self, function: Callable[..., Any], signature: str):
        self._function, self._signature = function, signature
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def _make(self) -> Callable[..., Any]:
        code = njit(nogil=True)(self._function)
        code._cache = _Entry(self.name)
        _run_compiler(code.compile, self._signature)
        code.disable_compile()
        return code  # type: ignore[no-any-return]

    def __call__(self, *arguments: Any) -> Any:
        """Run it; the arguments' types are the signature's, exactly."""
        call = self._code or (self._function if jit_disabled() else self.compile())
        return call(*arguments)


def array_function(signature: str) -> Callable[[Callable[..., Any]], ArrayFunction]:
    """Decorate a function of arrays; the signature is Numba's."""
    return lambda function: ArrayFunction(function, signature)

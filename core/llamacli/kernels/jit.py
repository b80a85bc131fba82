"""Kernel compiler with a disk cache.

Kernels are compiled when they are first needed, once for each CPU, and cached on disk.

A kernel is one step of a program, run by every thread of a team at once. All have the same signature, `(args, run,
thread, n_threads)`: the address of a record of the step's own parameters, the address of a record that all steps of a
run share, this thread's number and the number of threads. Each thread does its share of the work and returns.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
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
from numba.core.bytecode import FunctionIdentity
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
"""Seconds without use after which the kernels of other sources, or of another CPU, are deleted."""

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


listeners: list[Callable[[str], None]] = []
"""Callbacks, called with the name of a kernel that is about to be compiled."""


def cache_directory() -> Path | None:
    """Folder of compiled kernels of this user, None without a home.

    There is one for each state of the sources and each CPU. LLAMACLI_CACHE names another folder than the system's usual
    one.
    """
    base = os.environ.get("LLAMACLI_CACHE") or user_folder("cache")
    return Path(base) / "kernels" / _fingerprint() if base else None


def sources() -> list[Path]:
    """Source files that the cache key covers."""
    package = Path(__file__).parents[1]
    folders = ("kernels", "ops", "quantization")
    return [source for folder in folders for source in sorted((package / folder).rglob("*.py"))]


@functools.cache
def _fingerprint() -> str:
    """Hash of the sources, versions, settings and CPU."""
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version, isa())
    settings = (config.OPT, config.BOUNDSCHECK)
    digest.update(repr((versions, settings, cpu_target.target_context.codegen().magic_tuple())).encode())
    return digest.hexdigest()[:16]


class _Entry:
    """Cache file of a kernel, as the cache object of a CFunc.

    Numba's own cache has three drawbacks: its folder is a setting of the whole process, that folder must be writable,
    and its contents are trusted unchecked. Here a checksum precedes the code.
    """

    def __init__(self, name: str):
        directory = cache_directory()
        self._name, self._path = name, directory and directory / f"{name}.kernel"

    def load_overload(self, _signature: Any, context: Any) -> CompileResult | None:
        """Load the code, or return None if it must be compiled."""
        with contextlib.suppress(OSError):
            data = self._read()
            if data and hashlib.sha256(data[32:]).digest() == data[:32]:
                _touch(self._path.parent)
                context.refresh()  # symbols that the code refers to must exist before linking
                with contextlib.suppress(ImportError):  # of a plugin's module that is not importable by its name
                    return CompileResult._rebuild(context, *pickle.loads(data[32:]))
            elif data:
                _log.warning("%s is damaged and is compiled again", self._path)
        _announce()
        for listener in listeners:
            listener(self._name)
        return None

    def _read(self) -> bytes:
        """Read the file; b"" if other users may have written it.

        It holds a pickle, which is code.
        """
        if self._path is None:
            return b""
        with open(self._path, "rb") as file:
            if not _is_own(os.stat(self._path.parent)):
                _warn_cache_unwritable(f"other users can write to {self._path.parent}")
            elif not _is_own(os.fstat(file.fileno())):
                _log.warning("other users can write to %s, so it is compiled again", self._path)
            else:
                return file.read()
        return b""

    def save_overload(self, _signature: Any, result: CompileResult) -> None:
        """Write the code; if that fails, this process alone has it."""
        if self._path is None:
            _warn_cache_unwritable("this user has no home folder, and LLAMACLI_CACHE names none")
            return
        assert not result.library.has_dynamic_globals, f"{self._name} holds addresses of this process"
        try:
            code = dumps(result._reduce())
        except RuntimeError:  # an interrupt in LLVM's callback is lost, and the object code with it
            return
        written = self._path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")
        try:
            if not self._path.parent.exists():
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _prune(self._path.parent.parent)
            try:
                written.touch(mode=0o600, exist_ok=False)
                written.write_bytes(hashlib.sha256(code).digest() + code)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            _warn_cache_unwritable(str(error))


def _is_own(status: os.stat_result) -> bool:
    """Test that only this user and the superuser can write a file."""
    return sys.platform == "win32" or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)


@functools.cache
def _touch(folder: Path) -> None:
    """Set the folder's time of last use to now."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def _prune(folder: Path) -> None:
    """Delete cache folders unused for _UNUSED_S seconds."""
    with contextlib.suppress(OSError):
        for other in folder.iterdir():
            is_ours = len(other.name) == 16 and not set(other.name) - set(string.hexdigits)
            if is_ours and time.time() - other.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


@functools.cache
def _announce() -> None:
    _log.warning("compiling kernels for this CPU; this happens once and takes some seconds")


_unwritable_reasons: list[str] = []


def _warn_cache_unwritable(reason: str) -> None:
    if not _unwritable_reasons:
        _unwritable_reasons.append(reason)
        _log.warning("compiled kernels cannot be cached, so every process compiles them: %s", reason)


Code = TypeVar("Code")

_compiling = threading.RLock()
"""Held while a function is compiled or loaded: code compiled twice would be freed with its owner."""


def _run_compiler(compile_it: Callable[..., object], *arguments: object) -> None:
    """Run Numba's compiler; release its lock after an interrupt.

    An interrupt at the wrong moment would otherwise leave the lock with this thread for ever.

    Symbols get names that no other process uses. Numba numbers functions from 1 in every process and puts the number
    into the symbol, and functions that a kernel calls are weak symbols. Two kernels that two processes compiled would
    use the same name for different closures, and where both are loaded, the second one would call the first one's.
    """
    FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))
    try:
        compile_it(*arguments)
    except BaseException:
        while global_compiler_lock.is_locked():
            global_compiler_lock.release()
        raise


class _OnDemand(ABC, Generic[Code]):
    """Lazily compiled code: compiled or loaded from the cache when needed."""

    _code: Code | None = None

    @abstractmethod
    def _make(self) -> Code:
        """Compile or load it."""

    def compile(self) -> Code:
        """Compile or load it unless that has been done."""
        if self._code is None:
            with _compiling:
                if self._code is None:
                    self._code = self._make()
        return self._code


class Compiled(_OnDemand[CFunc]):
    """Function compiled to machine code.

    Its name and `variant` are unique.
    """

    def __init__(self, function: Callable[..., Any], signature: Any, variant: str = ""):
        self._function, self._signature, self._variant = function, signature, variant
        self.__doc__ = function.__doc__

    @functools.cached_property
    def name(self) -> str:
        """Name of the code in the cache."""
        return self._function.__name__ + self._variant

    def _make(self) -> CFunc:
        code = CFunc(self._function, (self._signature.args, self._signature.return_type), locals={}, options={})
        code._cache = _Entry(self.name)
        _run_compiler(code.compile)
        return code

    @property
    def address(self) -> int:
        """Address of the machine code."""
        return int(self.compile().address)

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """ctypes function that runs it without the GIL."""
        return self.compile().ctypes  # type: ignore[no-any-return]


class Kernel(Compiled):
    """Kernel: compiled step of a program.

    See this module's description. The name of a plugin's kernel contains a digest of its code.
    """

    def __init__(self, function: Callable[..., None], variant: str = ""):
        super().__init__(function, SIGNATURE, variant)

    @functools.cached_property
    def name(self) -> str:
        """Name of the code in the cache.

        It is read late: all that the code refers to must be defined.
        """
        digest = function_digest(self._function)
        return super().name + (f"_{digest}" if digest else "")


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel."""
    return Kernel(function)


class ArrayFunction(_OnDemand[Callable[..., Any]]):
    """Compiled function of arrays, called from Python without the GIL.

    Where NUMBA_DISABLE_JIT is set, it is plain Python.
    """

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

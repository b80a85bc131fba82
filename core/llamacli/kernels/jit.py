"""Kernel compiler with a disk cache.

Kernels are compiled when they are first needed, once for each CPU, and cached on disk.

A kernel is one step of a program, run by every thread of a team at once. All have the same signature, `(args, run,
thread, n_threads)`: the address of a record of the step's own parameters, the address of a record that all steps of a
run share, this thread's number and the number of threads. Each thread does its share of the work and returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import string
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from llamacli.kernels.blocks import Block
from llamacli.kernels.deferred import import_numba
from llamacli.kernels.digest import function_digest
from llamacli.kernels.isa import host, isa
from llamacli.kernels.linker import link, undefined_symbols
from llamacli.kernels.switch import jit_disabled
from llamacli.util.files import is_own
from llamacli.util.folders import cache_folder

_log = logging.getLogger(__name__)

_UNUSED_S = 30 * 24 * 3600
"""Seconds without use after which the kernels of other sources, or of another CPU, are deleted."""

SIGNATURE = "void(int64, int64, int64, int64)"

_NUMBA_SETTINGS = ("OPT", "BOUNDSCHECK", "CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "LOOP_VECTORIZE", "SLP_VECTORIZE")
"""Settings of Numba that change machine code, without their prefix NUMBA_."""

listeners: list[Callable[[str], None]] = []
"""Callbacks, called with the name of a kernel that is about to be compiled."""

helpers: list[Callable[[str], bool]] = []
"""Callbacks, called with the name of a kernel that is not cached: true if another process has now compiled it."""


def cache_directory() -> Path | None:
    """Folder of compiled kernels of this user, None without a home.

    There is one for each state of the sources and each CPU. LLAMACLI_CACHE names another folder than the system's usual
    one.
    """
    base = cache_folder()
    return base / "kernels" / _fingerprint() if base else None


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
    versions = (_numba_version(), llvmlite.__version__, np.__version__, sys.version, isa())
    settings = [os.environ.get(f"NUMBA_{name}") for name in _NUMBA_SETTINGS]
    digest.update(repr((versions, settings, host())).encode())
    return digest.hexdigest()[:16]


def _numba_version() -> bytes:
    """Source of Numba's version, read without importing it."""
    found = importlib.util.find_spec("numba")
    assert found
    assert found.origin
    return Path(found.origin).with_name("_version.py").read_bytes()


class _Entry:
    """Cache file of a kernel: checksum, line of JSON, object code.

    Numba's own cache has three drawbacks: its folder is a setting of the whole process, that folder must be writable,
    and its contents are trusted unchecked. And it needs Numba to be imported.
    """

    def __init__(self, name: str):
        directory = cache_directory()
        self._name, self._path = name, directory and directory / f"{name}.kernel"

    def load(self) -> int | None:
        """Load and link the code.

        Returns its address, or None if it must be compiled.
        """
        with contextlib.suppress(OSError):
            data = self._read()
            if data and hashlib.sha256(data[32:]).digest() == data[:32]:
                _touch(self._path.parent)
                head, _, code = data[32:].partition(b"\n")
                if (address := link(code, *json.loads(head))) is not None:
                    return address
            elif data:
                _log.warning("%s is damaged and is compiled again", self._path)
        return None

    def _read(self) -> bytes:
        """Read the file; b"" if other users may have written it."""
        if self._path is None:
            return b""
        with open(self._path, "rb") as file:
            if not is_own(os.stat(self._path.parent)):
                _warn_cache_unwritable(f"other users can write to {self._path.parent}")
            elif not is_own(os.fstat(file.fileno())):
                _log.warning("other users can write to %s, so it is compiled again", self._path)
            else:
                return file.read()
        return b""

    def save(self, code: bytes, symbol: str, needs: list[str] | None) -> None:
        """Write the code; if that fails, this process alone has it."""
        if self._path is None:
            _warn_cache_unwritable("this user has no home folder, and LLAMACLI_CACHE names none")
            return
        data = json.dumps((symbol, needs)).encode() + b"\n" + code
        written = self._path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")
        try:
            if not self._path.parent.exists():
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _prune(self._path.parent.parent)
            try:
                written.touch(mode=0o600, exist_ok=False)
                written.write_bytes(hashlib.sha256(data).digest() + data)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            _warn_cache_unwritable(str(error))


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


_compiling = threading.RLock()
"""Held while a function is compiled or loaded, so that it is done once."""

_ctypes = {"void": None, "int64": ctypes.c_int64, "float32": ctypes.c_float, "float64": ctypes.c_double}


class Compiled:
    """Function of numbers compiled to machine code.

    Its name and `variant` are unique; its signature is Numba's, of int64, float32 and float64.
    """

    _address: int | None = None

    def __init__(self, function: Callable[..., Any], signature: str, variant: str = ""):
        self._function, self._signature, self._variant = function, signature, variant
        self.__doc__ = function.__doc__

    @functools.cached_property
    def name(self) -> str:
        """Name of the code in the cache."""
        return self._function.__name__ + self._variant

    def compile(self) -> int:
        """Compile it or load it from the cache, once.

        Returns the address of the machine code.
        """
        if self._address is None:
            with _compiling:
                if self._address is None:
                    self._address = self._make()
        return self._address

    def _to_compile(self) -> Callable[..., Any]:
        return self._function

    def _make(self) -> int:
        entry = _Entry(self.name)
        address = entry.load()
        if address is None and any(wait(self.name) for wait in helpers):
            address = entry.load()
        if address is None:
            from llamacli.kernels.compiler import compile_function

            _announce()
            for listener in listeners:
                listener(self.name)
            symbol, code = compile_function(self._to_compile(), self._signature, self.name)
            needs = undefined_symbols(code)
            entry.save(code, symbol, needs)
            address = link(code, symbol, needs)
            assert address, f"{self.name} needs one of {needs}, which this process has not"
        return address

    @property
    def address(self) -> int:
        """Address of the machine code."""
        return self.compile()

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        """ctypes function that runs it without the GIL."""
        result, parameters = self._signature.rstrip(")").split("(")
        kinds = [_ctypes[parameter.strip()] for parameter in parameters.split(",")]
        return ctypes.CFUNCTYPE(_ctypes[result], *kinds)(self.compile())


class Kernel(Compiled):
    """Kernel: compiled step of a program.

    See this module's description. The name of a plugin's kernel contains a digest of its code, and of `parts`, the
    functions that a kernel of the core was made of.
    """

    def __init__(self, function: Callable[..., None], variant: str = "", parts: Sequence[Callable[..., Any]] = ()):
        super().__init__(function, SIGNATURE, variant)
        self._parts = parts

    @functools.cached_property
    def name(self) -> str:
        """Name of the code in the cache.

        It is read late: all that the code refers to must be defined.
        """
        digest = function_digest(self._function, *self._parts)
        return super().name + (f"_{digest}" if digest else "")


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel."""
    return Kernel(function)


class ArrayFunction(Compiled):
    """Compiled function of arrays, called from Python without the GIL.

    Its signature is Numba's: of contiguous arrays, tuples of them, and numbers; its result is a number or nothing.
    Where NUMBA_DISABLE_JIT is set, it is plain Python.
    """

    def __init__(self, function: Callable[..., Any], signature: str):
        super().__init__(function, "void(int64)")
        self._block = Block(signature)

    def _to_compile(self) -> Callable[..., Any]:
        import_numba()
        return self._block.taking(self._function)

    def __call__(self, *arguments: Any) -> Any:
        """Run it; the arguments' types are the signature's, exactly."""
        if jit_disabled():
            return self._function(*arguments)
        memory = self._block.filled(arguments)
        self.call(ctypes.addressof(memory))
        return self._block.result(memory)


def array_function(signature: str) -> Callable[[Callable[..., Any]], ArrayFunction]:
    """Decorate a function of arrays; the signature is Numba's."""
    return lambda function: ArrayFunction(function, signature)

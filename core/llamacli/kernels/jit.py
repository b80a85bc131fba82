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
import json
import logging
import os
import string
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamacli.kernels.blocks import Block
from llamacli.kernels.deferred import import_numba
from llamacli.kernels.digest import function_digest, source_digest
from llamacli.kernels.elf import undefined_symbols
from llamacli.kernels.isa import architecture, isa, target
from llamacli.kernels.linker import calls_numba, link
from llamacli.kernels.packs import pack, with_checksum, without_checksum
from llamacli.kernels.switch import jit_disabled
from llamacli.util.files import SharedFileError, make_own_folder, open_own
from llamacli.util.folders import cache_folder

_log = logging.getLogger(__name__)

_UNUSED_S, _TOUCH_S = 30 * 24 * 3600, 24 * 3600
"""Seconds without use after which kernels are deleted, and after which the time of last use is set again."""

SIGNATURE = "void(int64, int64, int64, int64)"

_NUMBA_SETTINGS = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE")
"""Settings of Numba that change machine code, without their prefix NUMBA_."""

listeners: list[Callable[[str], None]] = []
"""Callbacks, called with the name of a kernel that is about to be compiled."""

helpers: list[Callable[[str], bool]] = []
"""Callbacks, called with the name of a kernel that is not cached: true if another process has now compiled it."""


def cache_directory() -> Path | None:
    """Folder of compiled kernels of this user, None without a home.

    There is one for each CPU and each set of versions that are compiled with. LLAMACLI_CACHE names another folder than
    the system's usual one.
    """
    base = cache_folder()
    return base / "kernels" / fingerprint() if base else None


@functools.cache
def fingerprint() -> str:
    """Hash of all but sources that machine code of kernels depends on.

    The system, the instruction set with the features that it stands for, and settings of Numba. Object code is linked
    by name with functions of the C library, so the versions of Python, NumPy and LLVM are not part of it; `_Entry`
    compares that of Numba for code that calls its functions.
    """
    triple, *cpu = target()
    settings = [os.environ.get(f"NUMBA_{name}") for name in _NUMBA_SETTINGS]
    parts = architecture(triple), sys.platform, isa(), cpu, settings
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Entry:
    """Cache file of a kernel: checksum, line of JSON, object code.

    The line has the symbol, the `undefined_symbols`, and the version of Numba if some of them are its functions.
    Numba's own cache has three drawbacks: its folder is a setting of the whole process, that folder must be writable,
    and its contents are trusted unchecked. And it needs Numba to be imported.
    """

    def __init__(self, name: str):
        directory = cache_directory()
        self._name, self._path = name, directory and directory / name

    def load(self) -> int | None:
        """Load and link the code.

        It is looked for in the user's cache, then in a pack. Returns its address, or None if it must be compiled.
        """
        with contextlib.suppress(OSError):
            data = self._read()
            if data and without_checksum(data) is None:
                _log.warning("%s is damaged and is compiled again", self._path)
            elif data and (address := link_entry(data)):
                return address
        data = pack(fingerprint()).entry(self._name)
        return link_entry(data) if data else None

    def _read(self) -> bytes:
        """Read the file; b"" if missing, or if others may write it."""
        if self._path is None:
            return b""
        try:
            with open_own(self._path) as file:
                if time.time() - os.fstat(file.fileno()).st_mtime > _TOUCH_S:
                    _touch(self._path)
                return file.read()
        except FileNotFoundError:
            return b""
        except SharedFileError as error:
            _say_shared(str(error))
        return b""

    def save(self, data: bytes) -> None:
        """Write an entry; if that fails, this process alone has it."""
        if self._path is None:
            _warn_cache_unwritable("this user has no home folder, and LLAMACLI_CACHE names none")
            return
        written = self._path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")
        try:
            make_own_folder(self._path.parent)
            _prune(self._path.parent.parent)
            try:
                written.touch(mode=0o600, exist_ok=False)
                written.write_bytes(data)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except SharedFileError as error:
            _say_shared(str(error))
        except OSError as error:
            _warn_cache_unwritable(str(error))


def link_entry(data: bytes) -> int | None:
    """Link a cache entry; its address, None if damaged or unusable here."""
    line, _, code = (without_checksum(data) or b"").partition(b"\n")
    if not line:
        return None
    symbol, needs, numba_version = json.loads(line)
    if numba_version and numba_version != _numba_version():
        return None
    return link(code, symbol, needs)


def _numba_version() -> str:
    import numba

    return str(numba.__version__)


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(file)


@functools.cache
def _prune(folder: Path) -> None:
    """Delete kernels unused for _UNUSED_S seconds, once in a process."""
    with contextlib.suppress(OSError):
        for other in folder.iterdir():
            if len(other.name) == 16 and not set(other.name) - set(string.hexdigits):
                was_used = time.time() - other.stat().st_mtime < _UNUSED_S
                for file in other.iterdir():
                    if time.time() - file.stat().st_mtime > _UNUSED_S:
                        file.unlink(missing_ok=True)
                if not was_used and not any(other.iterdir()):
                    other.rmdir()


@functools.cache
def _say_shared(reason: str) -> None:
    _log.info("compiled kernels are not cached: %s", reason)


@functools.cache
def _announce() -> None:
    _log.warning("compiling kernels for this CPU, for some seconds; later runs load them from the cache")


_unwritable_reasons: list[str] = []


def _warn_cache_unwritable(reason: str) -> None:
    if not _unwritable_reasons:
        _unwritable_reasons.append(reason)
        _log.warning("compiled kernels cannot be cached, so every process compiles them: %s", reason)


_compiling = threading.RLock()
"""Held while a function is compiled or loaded, so that it is done once."""

_interrupted: list[int] = []
"""Processes that were forked while another thread compiled: Numba's lock and state are that thread's."""


def _after_fork() -> None:
    global _compiling
    numbas = sys.modules.get("numba.core.compiler_lock")
    for lock in (_compiling, getattr(getattr(numbas, "global_compiler_lock", None), "_lock", None)):
        if lock is not None and lock.acquire(blocking=False):
            lock.release()
        elif lock is not None:
            _interrupted.append(os.getpid())
    _compiling = threading.RLock()
    helpers.clear()  # the threads that listen to them do not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

_ctypes: dict[str, Any] = {"void": None, "int64": ctypes.c_int64, "float32": ctypes.c_float, "float64": ctypes.c_double}


class Compiled:
    """Function of numbers compiled to machine code.

    Its name and `variant` are unique; its signature is Numba's, of int64, float32 and float64. `module` is the one that
    gives the function what it is compiled from, by default its own.
    """

    _address: int | None = None

    def __init__(self, function: Callable[..., Any], signature: str, variant: str = "", module: str = ""):
        self._function, self._signature, self._variant = function, signature, variant
        self._module = module or str(function.__globals__.get("__name__"))
        self.__doc__ = function.__doc__

    @functools.cached_property
    def name(self) -> str:
        """Name of the code in the cache."""
        return self._function.__name__ + self._variant

    @property
    def file_name(self) -> str:
        """Name of its cache file, with a digest of its sources."""
        return f"{self.name}-{source_digest(self._module)}.kernel"

    def compile(self) -> int:
        """Compile it, or load it, once; returns the machine code's address."""
        if self._address is None:
            with _compiling:
                if self._address is None:
                    self._address = self._make()
        return self._address

    def _to_compile(self) -> Callable[..., Any]:
        return self._function

    @property
    def is_cached(self) -> bool:
        """True if the user's cache or a pack has it."""
        folder = cache_directory()
        return bool(folder and (folder / self.file_name).exists()) or self.file_name in pack(fingerprint())

    def make_entry(self) -> bytes:
        """Compile it; returns the contents of its cache file."""
        from llamacli.kernels.compiler import compile_function

        symbol, code = compile_function(self._to_compile(), self._signature, self.name)
        needs = undefined_symbols(code)
        head = symbol, needs, _numba_version() if calls_numba(needs) else None
        return with_checksum(json.dumps(head).encode() + b"\n" + code)

    def _make(self) -> int:
        entry = _Entry(self.file_name)
        address = entry.load()
        if address is None and any(wait(self.name) for wait in helpers):
            address = entry.load()
        if address is None:
            if _interrupted:
                raise RuntimeError(
                    f"{self.name} cannot be compiled: this process was forked while another thread compiled. Fork "
                    "before a model is loaded or after it, or start processes by the method spawn"
                )
            _announce()
            for listener in listeners:
                listener(self.name)
            data = self.make_entry()
            entry.save(data)
            address = link_entry(data)
            assert address, f"{self.name} needs what this process has not"
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

    def __init__(
        self,
        function: Callable[..., None],
        variant: str = "",
        module: str = "",
        parts: Sequence[Callable[..., Any]] = (),
    ):
        super().__init__(function, SIGNATURE, variant, module)
        self._parts = parts

    @functools.cached_property
    def name(self) -> str:
        """Name in the cache, read late: all it refers to must exist."""
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

    def bound(self, *arguments: Any) -> Callable[[], object]:
        """Call with these arguments, which it keeps alive; returns nothing of use."""
        if jit_disabled():
            return functools.partial(self._function, *arguments)
        memory = self._block.filled(arguments)
        call = functools.partial(self.call, ctypes.addressof(memory))
        vars(call)["kept"] = memory, arguments
        return call


def array_function(signature: str) -> Callable[[Callable[..., Any]], ArrayFunction]:
    """Decorate a function of arrays; the signature is Numba's."""
    return lambda function: ArrayFunction(function, signature)

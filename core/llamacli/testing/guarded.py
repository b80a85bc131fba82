"""Pytest plugin that puts the memory of kernels between forbidden pages.

    pytest -p llamacli.testing.guarded --guard=end tests/kernels tests/engine

Kernels know addresses only, so nothing else would notice that one reads or writes a little too far: here the process
ends at that instant, with a traceback. With `end`, arrays end where a forbidden page begins; with `start`, they begin
where one ends. Buffers have room for the tokens at hand and no more; the pool of keys and values gets a page at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from llamacli.engine import batching, compiled_model, stages

_PROT_NONE = 0
_ALLOCATING = ("array", "ascontiguousarray", "concatenate", "empty", "full", "pad", "stack", "zeros")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_side = "end"


def pytest_addoption(parser: Any) -> None:
    """Add the option `--guard`."""
    parser.addoption("--guard", choices=("end", "start"), default="end", help="which end of arrays is guarded")


def pytest_configure(config: Any) -> None:
    """Guard all memory from the start of the run."""
    install(config.getoption("--guard"))


def memory(n_bytes: int) -> np.ndarray:
    """Zeros, uint8 [n_bytes], that end or begin at a forbidden page."""
    page = mmap.PAGESIZE
    size = -(-n_bytes // page) * page
    whole = np.frombuffer(mmap.mmap(-1, size + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    for place in (0, page + size):
        if _libc.mprotect(whole.ctypes.data + place, page, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page if _side == "start" else page + size - n_bytes
    return whole[start : start + n_bytes]


def guarded(array: np.ndarray) -> np.ndarray:
    """Copy an array, with its strides, to between forbidden pages."""
    if not array.nbytes or min(array.strides, default=0) < 0:
        return array.copy()
    n_bytes = array.itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    copy: np.ndarray = np.ndarray(array.shape, array.dtype, memory(n_bytes), strides=array.strides)
    copy[...] = array
    return copy


class _NumPy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if name not in _ALLOCATING:
            return value
        return lambda *args, **options: guarded(np.asarray(value(*args, **options)))


def _on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        pairs: list[tuple[np.ndarray, np.ndarray]] = []

        def copied(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            pairs.append((value, guarded(value)))
            return pairs[-1][1]

        result = function(*map(copied, args), **{name: copied(value) for name, value in options.items()})
        for original, copy in pairs:
            if original.flags.writeable:
                original[...] = copy
        return result

    return call


_LOCK = threading.RLock()
_MOST = 2
"""Programs of a model that are kept for other batches: Linux allows a process 65,530 mappings."""


class _Tight:
    """Program whose buffers just fit the tokens of each call."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._programs: dict[int, Any] = {}
        self.states = self._sized(1).states

    def recompiled(self, *arguments: Any) -> _Tight:
        return _Tight(lambda: self._make().recompiled(*arguments))

    def extended(self, graph: Any, file: Any) -> _Tight:
        kept = _Kept(file)
        return _Tight(lambda: self._make().extended(graph, kept))

    def _sized(self, n: int) -> Any:
        for module in _modules("engine"):
            if hasattr(module, "N_BATCH") and module not in (batching, compiled_model, stages):  # which have no buffers
                vars(module).update(N_BATCH=n)
        program = self._programs.pop(n, None) or self._make()
        self._programs[n] = program  # the last one used comes last
        others = [size for size in self._programs if size != 1]
        if len(others) > _MOST:
            del self._programs[others[0]]
        return program

    def forward(self, tokens: np.ndarray, spans: Any, n_last: Any, **options: Any) -> np.ndarray:
        with _LOCK:  # the size of a batch is a constant of modules, for all threads
            return self._sized(len(tokens)).forward(tokens, spans, n_last, **options)

    def forward_with_hidden(self, tokens: np.ndarray, spans: Any, n_last: Any) -> Any:
        with _LOCK:
            return self._sized(len(tokens)).forward_with_hidden(tokens, spans, n_last)

    def forward_in_pieces(self, tokens: np.ndarray, spans: Any, n_last: Any) -> Any:
        with _LOCK:
            pieces = self._sized(len(tokens)).forward_in_pieces(tokens, spans, n_last)
        with contextlib.closing(pieces):
            while True:
                with _LOCK:
                    self._sized(len(tokens))  # another size may have been in use since
                    try:
                        next(pieces)
                    except StopIteration as end:
                        return end.value
                yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs[1], name)


class _Kept:
    def __init__(self, file: Any):
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors
        self._data = {name: np.array(file.data(name)) for name in file.tensors}

    def data(self, name: str) -> np.ndarray:
        return self._data[name]

    def release(self, name: str) -> None:
        pass


def _modules(*packages: str) -> list[ModuleType]:
    names = tuple(f"llamacli.{package}" for package in packages)
    return [module for name, module in sys.modules.items() if name.startswith(names)]


def install(side: str) -> None:
    """Guard all memory that is allocated from now on."""
    global _side
    _side = side
    from llamacli import session  # noqa: F401 - loads the modules that it needs
    from llamacli.engine import lowering, native, weights
    from llamacli.kernels import encoding, packing, team
    from llamacli.kv import pool
    from llamacli.util import memory as system_memory

    # Kernels are left alone: Numba would not know what this is.
    for module in _modules("engine", "kv", "sampling", "session", "kernels.team"):
        if vars(module).get("np") is np:
            vars(module).update(np=_NumPy("numpy"))
    for module in (system_memory, lowering, weights, pool):
        vars(module).update(anonymous=memory)
    pack = _on_copies(packing.pack)
    for module in (packing, weights):
        vars(module).update(pack=pack)
    blocks = vars(encoding)["Blocks"]
    vars(encoding).update(
        Blocks=lambda **arrays: blocks(**{name: guarded(array) for name, array in arrays.items()}),
        encode=_on_copies(encoding.encode),
    )
    vars(team).update(run_kernel=_on_copies(team.run_kernel))
    pool._SLAB_BYTES = 1
    engine: Any = native.NativeEngine
    compile_graph = engine.compile

    def compile_tight(engine: Any, graph: Any, file: Any, mode: Any) -> _Tight:
        kept = _Kept(file)
        return _Tight(lambda: compile_graph(engine, graph, kept, mode))

    engine.compile = compile_tight

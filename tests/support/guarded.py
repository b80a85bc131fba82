"""A pytest plugin that puts all memory that kernels work on between pages that nobody may touch.

    pytest -p guarded --guard=end tests/kernels tests/engine

Kernels know addresses only, so nothing else would notice that one reads or writes a little too far: here the process
ends at that instant, with a traceback. With `end`, arrays end where a forbidden page begins; with `start`, they begin
where one ends. Buffers have room for the tokens at hand and no more; the pool of keys and values gets a page at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_PROT_NONE = 0
_ALLOCATING = ("array", "ascontiguousarray", "concatenate", "empty", "full", "pad", "stack", "zeros")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_side = "end"


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--guard", choices=("end", "start"), default="end", help="which end of arrays is guarded")


def pytest_configure(config: Any) -> None:
    install(config.getoption("--guard"))


def memory(n_bytes: int) -> np.ndarray:
    """Zeros, uint8 [n_bytes], that end, or begin, at a page that nobody may touch."""
    if not n_bytes:
        return np.zeros(0, np.uint8)
    page = mmap.PAGESIZE
    size = -(-n_bytes // page) * page
    whole = np.frombuffer(mmap.mmap(-1, size + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    for place in (0, page + size):
        if _libc.mprotect(whole.ctypes.data + place, page, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page if _side == "start" else page + size - n_bytes
    return whole[start : start + n_bytes]


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy between forbidden pages."""
    copy = memory(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class _NumPy(ModuleType):
    """NumPy, but that what it allocates is guarded."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if name not in _ALLOCATING:
            return value
        return lambda *args, **options: guarded(np.asarray(value(*args, **options)))


def _on_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with guarded copies of all arrays, and put back what it wrote to them."""

    def call(*args: Any, **options: Any) -> Any:
        pairs: list[tuple[np.ndarray, np.ndarray]] = []

        def copied(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            pairs.append((value, guarded(np.ascontiguousarray(value))))
            return pairs[-1][1]

        result = function(*map(copied, args), **{name: copied(value) for name, value in options.items()})
        for original, copy in pairs:
            if original.flags.writeable:
                original[...] = copy
        return result

    return call


class _Tight:
    """A program whose buffers have room for just as many tokens as each call has: one layout for each number."""

    def __init__(self, compile_graph: Callable[..., Any], engine: Any, graph: Any, file: Any, mode: Any):
        kept = _Kept(file)
        self.states = graph.states
        self._make = lambda: compile_graph(engine, graph, kept, mode)
        self._programs: dict[int, Any] = {}
        self._sized(1)

    def _sized(self, n: int) -> Any:
        for module in _modules("engine"):
            if hasattr(module, "N_BATCH"):
                module.N_BATCH = n
        if n not in self._programs:
            self._programs[n] = self._make()
        return self._programs[n]

    def forward(self, tokens: np.ndarray, spans: Any, *, all_logits: bool) -> np.ndarray:
        return self._sized(len(tokens)).forward(tokens, spans, all_logits=all_logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs[1], name)


class _Kept:
    """A model file whose tensors can be read after it has been closed."""

    def __init__(self, file: Any):
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors
        self._data = {name: np.array(file.data(name)) for name in file.tensors}

    def data(self, name: str) -> np.ndarray:
        return self._data[name]

    def release(self, name: str) -> None:
        pass


def _modules(*packages: str) -> list[ModuleType]:
    """The modules of these packages that are loaded."""
    names = tuple(f"llamacli.{package}" for package in packages)
    return [module for name, module in sys.modules.items() if name.startswith(names)]


def install(side: str) -> None:
    """Guard everything from now on; models that are loaded already keep the memory that they have."""
    global _side
    _side = side
    import running
    from llamacli import session  # noqa: F401 - loads the modules that it needs
    from llamacli.engine import native, weights
    from llamacli.kernels import encoding, packing
    from llamacli.kv import pool
    from llamacli.util import memory as system_memory

    # Kernels are left alone: Numba would not know what this is.
    for module in _modules("engine", "kv", "sampling", "session", "kernels.team"):
        if getattr(module, "np", None) is np:
            module.np = _NumPy("numpy")  # type: ignore[attr-defined]
    for module in (system_memory, weights, pool):
        module.anonymous = memory
    packing.pack = weights.pack = _on_copies(packing.pack)
    blocks = encoding.Blocks
    encoding.Blocks = lambda **arrays: blocks(**{name: guarded(array) for name, array in arrays.items()})
    encoding.encode = _on_copies(encoding.encode)
    running.run_kernel = _on_copies(running.run_kernel)
    pool._SLAB_BYTES = 1
    compile_graph = native.NativeEngine.compile
    native.NativeEngine.compile = lambda *args: _Tight(compile_graph, *args)

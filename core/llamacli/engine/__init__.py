"""Engines: compile a recorded graph and run it on tokens."""

from llamacli.engine.base import Engine, Program
from llamacli.engine.batching import Chunk, evaluate
from llamacli.engine.reference import ReferenceEngine
from llamacli.kernels.switch import jit_disabled
from llamacli.ops.run import Span
from llamacli.util.settings import LoadMode, QuantMode


def default_engine(threads: int | None = None, copy_key: str | None = None, load: LoadMode = LoadMode.AUTO) -> Engine:
    """Fastest engine available here.

    Compiled kernels, or NumPy where NUMBA_DISABLE_JIT forbids to compile. `copy_key` and `load` are as for
    `NativeEngine`. Raises InvalidRequestError if `threads` is not a valid number of threads; see
    `llamacli.kernels.team.check_threads`.
    """
    if jit_disabled():
        return ReferenceEngine()
    from llamacli.engine.native import NativeEngine

    return NativeEngine(threads, copy_key=copy_key, load=load)


__all__ = [
    "Chunk",
    "Engine",
    "LoadMode",
    "Program",
    "QuantMode",
    "ReferenceEngine",
    "Span",
    "default_engine",
    "evaluate",
    "jit_disabled",
]

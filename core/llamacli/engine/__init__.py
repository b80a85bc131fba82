"""Engines: what compiles a recorded graph and runs it on tokens."""

from llamacli.engine.base import Engine, Program
from llamacli.engine.batching import evaluate
from llamacli.engine.reference import ReferenceEngine
from llamacli.kernels.switch import jit_disabled
from llamacli.ops.run import Span
from llamacli.util.settings import QuantMode


def default_engine(threads: int | None = None) -> Engine:
    """The fastest engine that runs here: compiled kernels, or NumPy where NUMBA_DISABLE_JIT forbids to compile.

    Raises InvalidRequestError if `threads` is no number of threads; see `llamacli.kernels.team.check_threads`.
    """
    if jit_disabled():
        return ReferenceEngine()
    from llamacli.engine.native import NativeEngine

    return NativeEngine(threads)


__all__ = ["Engine", "Program", "QuantMode", "ReferenceEngine", "Span", "default_engine", "evaluate", "jit_disabled"]

"""Engines: compile a recorded graph and run it on tokens."""

from llamacli.engine.base import Engine, Program
from llamacli.engine.batching import Chunk, evaluate
from llamacli.engine.reference import ReferenceEngine
from llamacli.kernels.switch import jit_disabled
from llamacli.ops.run import Span
from llamacli.util.settings import LoadMode, Prompts, QuantMode


def default_engine(
    threads: int | None = None,
    copy_key: str | None = None,
    prompts: Prompts = Prompts.REGISTERS,
    *,
    mapped: bool = False,
) -> Engine:
    """Fastest engine available here.

    Compiled kernels, or NumPy where NUMBA_DISABLE_JIT forbids to compile. `copy_key`, `prompts` and `mapped` are as for
    `NativeEngine`. Raises InvalidRequestError if `threads` is not a valid number of threads, see
    `llamacli.kernels.team.check_threads`, and for prompts by tiles on a CPU without AMX.
    """
    if jit_disabled():
        return ReferenceEngine(prompts)
    from llamacli.engine.native import NativeEngine

    return NativeEngine(threads, copy_key=copy_key, prompts=prompts, mapped=mapped)


__all__ = [
    "Chunk",
    "Engine",
    "LoadMode",
    "Program",
    "Prompts",
    "QuantMode",
    "ReferenceEngine",
    "Span",
    "default_engine",
    "evaluate",
    "jit_disabled",
]

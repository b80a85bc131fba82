"""Second process that compiles common kernels while a first run compiles others.

Numba compiles on one core. So the first run with an empty cache starts this module as a program. It compiles kernels
that most runs need, those first that are needed last, and writes the name of each as it begins with it. A process that
comes to such a kernel waits for it; it compiles itself what the program has not begun.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from llamacli.kernels import attention, jit, sampling
from llamacli.kernels.kv_types.types import KVType
from llamacli.kernels.switch import jit_disabled
from llamacli.util.system import load_average, running_threads, usable_cores

_PATIENCE_S = 2.0
"""Seconds that a process waits for a kernel of the program, whose core others may have taken."""


def common_kernels() -> list[jit.Compiled]:
    """Kernels of most runs: default sampling, attention with the default cache."""
    kv_type = KVType("f16", "f16")
    return [
        sampling.apply_steps,
        attention.attention(kv_type),
        attention.store_kv(kv_type),
    ]


def start_helper() -> None:
    """Start the program if a core is idle and kernels are missing."""
    folder = jit.cache_directory()
    if folder is None or jit_disabled() or any(kernel.is_cached for kernel in common_kernels()):
        return
    if not _has_idle_core() or not sys.executable:
        return
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    assert process.stdout
    jit.helpers.append(_Progress(process.stdout, process.wait).wait)


def _has_idle_core() -> bool:
    """True if this process leaves a core idle at this moment.

    Other programs may run for an instant: the fewest threads of a few milliseconds count. Where their number is
    unknown, the load average does.
    """
    if usable_cores().threads < 2:
        return False
    samples = []
    for pause_s in (0.0, 0.001, 0.002):
        time.sleep(pause_s)
        samples.append(running_threads())
    known = [threads for threads in samples if threads is not None]
    if known:
        return min(known) < (os.cpu_count() or 1)
    load = load_average()
    return load is not None and load < usable_cores().threads - 1


class _Progress:
    """Names that the program has written so far.

    `end` is called when it writes no more. It ends by itself if nobody reads them.
    """

    def __init__(self, names: IO[str], end: Callable[[], object]):
        self._begun: list[str] = []
        self._end = end
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(names,), name="llamacli-helper", daemon=True).start()

    def _read(self, names: IO[str]) -> None:
        with names:
            for name in itertools.chain(names, [""]):
                with self._changed:
                    self._begun.append(name.strip())
                    self._changed.notify_all()
        self._end()

    def wait(self, name: str) -> bool:
        """Wait for a kernel; False if not begun, or after too long."""
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._begun or self._begun[-1] != name, _PATIENCE_S)
            return ended and name in self._begun


def main() -> None:
    """Compile common kernels, as long as they can be cached."""
    for kernel in common_kernels():
        print(kernel.name, flush=True)
        kernel.compile()
        if not kernel.is_cached:
            break


if __name__ == "__main__":
    gc.disable()  # the program ends before garbage matters
    main()

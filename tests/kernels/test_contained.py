"""Kernels in processes that have Numba functions of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DECORATED_MEANWHILE = """
import sys, threading
import numba
from numba.core import types
from numba.extending import intrinsic
from llamacli.kernels.jit import Compiled

begun, decorated, functions = threading.Event(), threading.Event(), []

def odd(x):
    return 2 * x + 1

def decorate():
    begun.wait(60)
    functions.append(numba.njit(cache=True)(odd))
    decorated.set()

@intrinsic
def meet(typingctx):
    begun.set()
    decorated.wait(60)
    return types.void(), lambda context, builder, signature, args: context.get_dummy_value()

def kernel(x):
    meet()
    return x + 1

thread = threading.Thread(target=decorate)
thread.start()
print(Compiled(kernel, "int64(int64)").call(3))
thread.join()
print(functions[0](20), sum(functions[0].stats.cache_hits.values()))
"""

HOST = """
import faulthandler, gc, ctypes, logging, os, random, signal, sys, threading, warnings
import numba
import numpy as np
from numba.core.registry import cpu_target

faulthandler.enable()
libm = ctypes.CDLL("libm.so.6")
logging.basicConfig(level=logging.ERROR)

@numba.njit(cache=True)
def cached(n):
    total = 0
    for i in range(n):
        total += i * i % 7
    return total

def plain(n):
    return np.arange(n).sum() + len(str(n))

def state():
    root = logging.getLogger()
    return {
        "numba": {name: value for name, value in vars(numba.config).items() if name.isupper()},
        "target": dict(vars(cpu_target)),
        "contexts": [type(cpu_target.target_context), type(cpu_target.typing_context)],
        "filters": list(warnings.filters),
        "logging": (root.level, list(root.handlers), list(root.filters), logging.root.manager.disable),
        "hooks": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile(), sys.displayhook),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "affinity": os.sched_getaffinity(0),
        "floats": (np.geterr(), libm.fegetround(), libm.fegetexcept(), float(np.float32(1e-40) * np.float32(1))),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)),
        "random": (random.getstate(), [str(part) for part in np.random.get_state()]),
        "process": (os.getcwd(), sys.getrecursionlimit(), sys.getswitchinterval()),
    }

numba.njit(plain)(3)
contexts = cpu_target.typing_context, cpu_target.target_context
before, stop, foreign, wrong, counts = state(), threading.Event(), [], [], [0, 0]

def host(use):
    while not stop.wait(0.001):
        use()

def decorate():
    for cache in (True, False):
        function = numba.njit(cache=cache)(lambda x: x + 1)
        counts[0] += 1
        if (function.typingctx, function.targetctx) != contexts:
            foreign.append(function)

def compute():
    function = numba.njit(plain)
    counts[1] += 1
    if (function(10), cached(1000)) != (47, sum(i * i % 7 for i in range(1000))):
        wrong.append(function(10))
    changed = [name for name, value in state().items() if value != before[name]]
    if set(changed) - {"filters"}:  # Numba replaces filters for as long as it infers types
        wrong.append(changed)

threads = [threading.Thread(target=host, args=(use,), daemon=True) for use in (decorate, compute)]
for thread in threads:
    thread.start()

import llamacli
from llamacli.kernels import jit
from llamacli.hub.demo import demo_path
compiled = []
jit.listeners.append(compiled.append)
with llamacli.load_model(str(demo_path()), threads=2) as model, model.create_session() as session:
    ids = [token.id for token in session.generate([1, 5, 9], max_tokens=8)]
stop.set()
for thread in threads:
    thread.join()
assert all(counts), counts
assert not foreign, f"{len(foreign)} of {counts[0]} functions have another context than Numba's"
assert not wrong, wrong
after = state()
assert after == before, [name for name in before if after[name] != before[name]]
print(*ids, bool(compiled))
"""


def run(path: Path, folder: Path, kernels: str) -> list[str]:
    """Lines that a program prints; its caches are in `folder`."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder / "numba"), "LLAMACLI_CACHE": str(folder / kernels)}
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.medium
def test_function_decorated_while_a_kernel_compiles_can_be_cached(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DECORATED_MEANWHILE)
    assert run(program, tmp_path, "0") == ["4", "41 0"]
    for start in ("1", "2"):
        assert run(program, tmp_path, start) == ["4", "41 1"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="compares Linux's state of a process")
def test_process_with_functions_of_its_own_is_unchanged(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HOST)
    ((cold,), (warm,)) = run(program, tmp_path, "kernels"), run(program, tmp_path, "kernels")
    assert (cold.rpartition(" ")[2], warm.rpartition(" ")[2]) == ("True", "False")
    assert cold.split()[:-1] == warm.split()[:-1]

"""Processes that are forked after a model is loaded."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, signal, sys, threading, warnings
import llamacli
from llamacli.hub.demo import demo_path

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads

def story(model, n=12):
    with model.create_session() as session:
        return [token.id for token in session.generate([1, 5, 9], max_tokens=n)]

def in_children(n, work):
    '''Exit codes of forked processes that run at once.'''
    children = []
    for _ in range(n):
        if (child := os.fork()) == 0:
            signal.alarm(30)
            os._exit(work())
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

model = llamacli.load_model(str(demo_path()), threads=2)
"""

IDLE = """
def first():
    print(*story(model), flush=True)
    return 0

assert in_children(1, first) == [0]
expected = story(model)
session = model.create_session()
before = [token.id for token in session.generate([1, 5, 9], max_tokens=4)]

def again():
    rest = [token.id for token in session.generate([], max_tokens=4)]
    return story(model) != expected or [*before, *rest] != expected[:8]

assert in_children(3, again) == [0] * 3
assert again() == 0

def pooled(n):
    return story(model, n)

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(pooled, [12, 12, 3]).get(60) == [expected, expected, expected[:3]]
print(*expected)
"""

BUSY = """
expected, stop, sessions = story(model), threading.Event(), []

def work():
    while not stop.is_set():
        with model.create_session() as session:
            sessions.append(session)
            for _ in session.generate([1, 5, 9], max_tokens=100):
                if stop.is_set():
                    break

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
while len(sessions) < 3:
    pass

def compute():
    for session in sessions[-3:]:  # of threads that do not exist here
        try:
            session.eval([5])
        except llamacli.LlamaCliError:
            pass
    return story(model) != expected

codes = [code for _ in range(10) for code in in_children(1, compute)]
stop.set()
assert codes == [0] * 10, codes
"""

COMPILING = """
import time
from llamacli.kernels.jit import Compiled

begun, ended = threading.Event(), threading.Event()

def compile_long():
    from numba.core.compiler_lock import global_compiler_lock
    with global_compiler_lock:
        begun.set()
        ended.wait(60)

def double_in_a_child(x):
    return 2 * x

def compile_more():
    try:
        Compiled(double_in_a_child, "int64(int64)").compile()
    except RuntimeError as error:
        assert "this process was forked while another thread compiled" in str(error)
        return story(model) != expected
    return 1

expected = story(model)
thread = threading.Thread(target=compile_long)
thread.start()
begun.wait(60)
codes = in_children(2, compile_more)
ended.set()
assert codes == [0, 0], codes
"""


def run(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env=os.environ | env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")


@pytest.mark.medium
def test_forked_processes_generate_the_same_text() -> None:
    first, expected = run(IDLE).splitlines()
    assert first == expected


@pytest.mark.medium
def test_process_forked_while_others_generate_works() -> None:
    run(BUSY)


@pytest.mark.medium
def test_process_forked_while_others_compile_uses_cached_kernels_only() -> None:
    run(COMPILING)

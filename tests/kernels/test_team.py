"""Teams of threads: instruction sets, numbers of threads, interrupts."""

import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import carray

import llamacli
import tiny_llama
from llamacli.errors import InvalidRequestError
from llamacli.kernels import isa, simd
from llamacli.kernels.jit import kernel
from llamacli.kernels.layout import record
from llamacli.kernels.team import Team, check_threads
from llamacli.ops.columns import COLUMNS, columns_kernel
from llamacli.testing.kernels import run_kernel
from llamacli.util.system import usable_cores
from suite import STRIDE

PROGRAM = """
import logging, sys, llamacli
logging.basicConfig()
with llamacli.load_model(sys.argv[1], threads=int(sys.argv[2])) as model, model.create_session() as session:
    print([token.id for token in session.generate([1, 5, 9], max_tokens=12)])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama.write_llama(tmp_path_factory.mktemp("team") / "model.gguf", type="Q8_0")


def generate(model: Path, threads: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(threads)], env=os.environ | env, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


def sums(team: Team, n: int) -> np.ndarray:
    a = np.arange(n * 64, dtype=np.float32).reshape(n, 64)
    out = np.zeros_like(a)
    run_kernel(team, columns_kernel(), COLUMNS, n_rows=n, x=a, x_stride=a.strides[0], out=out, out_stride=256, width=64)
    return out - a


@pytest.mark.parametrize("name", ["sse", "AVX2", "avx512 "])
def test_an_unknown_instruction_set_is_refused(monkeypatch, name):
    monkeypatch.setenv(isa.VARIABLE, name)
    with pytest.raises(InvalidRequestError, match=r"LLAMACLI_ISA = .* is not one of generic, avx2"):
        isa.isa.__wrapped__()


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setenv(isa.VARIABLE, "avx512")
    monkeypatch.setattr(isa, "features", frozenset)
    with pytest.raises(InvalidRequestError, match="this CPU runs only generic"):
        isa.isa.__wrapped__()
    monkeypatch.delenv(isa.VARIABLE)
    assert isa.isa.__wrapped__() == "generic"


@pytest.mark.parametrize("threads", [0, -1, 1025, 10**6, True, 1.5, np.float32(2), "2"])
def test_invalid_numbers_of_threads_are_refused(threads):
    with pytest.raises(InvalidRequestError, match="is not a whole number from 1 to 1024"):
        check_threads(threads)


def test_number_of_threads_may_be_a_numpy_integer():
    assert type(check_threads(np.int64(1))) is int


def test_more_threads_than_cores_warn_once(caplog):
    most = usable_cores().threads
    for _ in range(2):
        assert check_threads(most + 5) == most + 5
    assert check_threads(most) == check_threads(None) == most
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [f"threads = {most + 5}"]


def test_each_work_unit_is_computed_once():
    for n_threads in (1, 2, 3, 7):
        team = Team(n_threads)
        for n in (1, 2, 5, 50):
            assert not sums(team, n).any()
        team.close()


def test_python_threads_share_a_team():
    team, failures = Team(2), []

    def work() -> None:
        for n in range(1, 60):
            if sums(team, n).any():
                failures.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    team.close()
    assert not failures


TALLY = record("counts")


@kernel
def tally(args: int, run: int, thread: int, n_threads: int) -> None:
    """Count the jobs of each thread, 64 bytes apart."""
    a = carray(simd.pointer(args), 1, TALLY)[0]
    carray(simd.pointer(a.counts + 64 * thread), 1, np.int64)[0] += 1


@pytest.fixture
def interrupted() -> Iterator[Callable[..., None]]:
    """Repeat an action until a KeyboardInterrupt comes at a random instant.

    A hang ends the tests with a traceback.
    """
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    faulthandler.dump_traceback_later(120, exit=True)

    def repeat(action: Callable[[], object], longest_s: float) -> None:
        try:
            # Another one comes later: where Python cannot raise, as in a destructor, the first is lost.
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, longest_s), 1.0)
            while True:
                action()
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)

    yield repeat
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, before)


@pytest.mark.deep
def test_each_job_runs_once_under_interrupts(interrupted):
    team, random_sleep = Team(3), random.Random(0)
    counts = np.zeros((3, 8), np.int64)
    done = interrupts = 0

    def job() -> None:
        nonlocal done
        if random_sleep.random() < 0.3:
            time.sleep(random_sleep.choice((0.0001, 0.001, 0.004)))  # workers spin, are about to sleep, sleep
        run_kernel(team, tally, TALLY, n_rows=0, counts=counts)
        done += 1

    job()  # compiles the kernel
    until = time.monotonic() + 10 / STRIDE
    while time.monotonic() < until:
        interrupted(job, 0.01)
        interrupts += 1
        assert len(set(counts[:, 0])) == 1, "every thread does every job"
        assert counts[0, 0] - done in (0, 1), "the interrupt may come after the job and before it is counted here"
        done = int(counts[0, 0])
        assert not sums(team, 5).any()
    team.close()
    assert interrupts > 100 / STRIDE
    assert done > interrupts


@pytest.mark.deep
def test_session_continues_after_interrupts(interrupted, model):
    with llamacli.load_model(model, threads=2) as loaded:
        with loaded.create_session(seq_len=200) as session:
            expected = [1, *(token.id for token in session.generate([1], max_tokens=151, ignore_eos=True))]
        until, interrupts = time.monotonic() + 5 / STRIDE, 0
        while time.monotonic() < until:
            session = loaded.create_session(seq_len=200)

            def write(session: llamacli.Session = session) -> None:
                session.rewind(0)
                for _ in session.generate([1], max_tokens=150, ignore_eos=True):
                    pass

            interrupted(write, 0.03)
            interrupts += 1
            reached = session.n_past
            if reached:
                session.rewind(reached - 1)
                session.eval(expected[reached - 1 : reached])
                assert session.sample() == expected[reached]
    assert interrupts > 20 / STRIDE


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's figures of threads")
def test_idle_workers_sleep():
    def switches() -> int:
        names = Path("/proc/self/task").glob("*/status")
        lines = [line for name in names for line in name.read_text().splitlines() if "ctxt_switches" in line]
        return sum(int(line.split()[1]) for line in lines)

    team = Team(4)
    assert not sums(team, 5).any()
    used = [time.process_time(), switches()]
    for _ in range(20):
        time.sleep(0.2)
        now = [time.process_time(), switches()]
        idle, used = (now[0] - used[0] < 0.01 and now[1] - used[1] <= 2), now
        if idle:
            break
    assert idle, "idle workers wake up"
    assert not sums(team, 5).any()
    team.close()


def test_text_does_not_depend_on_the_number_of_threads(model):
    expected = generate(model)
    assert expected.returncode == 0, expected.stderr
    assert generate(model, 3).stdout == expected.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", isa.available())
def test_text_does_not_depend_on_the_instruction_set(name, model):
    done = generate(model, LLAMACLI_ISA=name)
    assert (done.returncode, done.stdout) == (0, generate(model).stdout), done.stderr

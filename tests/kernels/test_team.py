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

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numba import carray, types

import llamacli
import tiny_llama
from llamacli.errors import InvalidRequestError
from llamacli.kernels import ir, isa, simd
from llamacli.kernels.jit import kernel
from llamacli.kernels.layout import RUN, record
from llamacli.kernels.team import STEP, VARIABLE, Team, check_threads, run_kernel
from llamacli.ops.columns import COLUMNS, columns_kernel
from llamacli.util.numa import Node
from llamacli.util.system import usable_cores
from suite import STRIDE, examples

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


def test_environment_sets_the_default_number_of_threads(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert check_threads(None) == 1
    assert check_threads(2) == 2
    monkeypatch.setenv(VARIABLE, "")
    assert check_threads(None) == usable_cores().threads


@pytest.mark.parametrize("given", ["0", "-1", "1025", "two", "1.5", "²"])
def test_invalid_environment_variable_is_refused_by_name(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(InvalidRequestError, match=f"LLAMACLI_THREADS = '{given}' is not a whole number"):
        check_threads(None)
    assert check_threads(1) == 1


def test_number_of_threads_may_be_a_numpy_integer():
    assert type(check_threads(np.int64(1))) is int


def test_more_threads_than_cores_warn_once(caplog):
    most = usable_cores().threads
    for _ in range(2):
        assert check_threads(most + 5) == most + 5
    assert check_threads(most) == check_threads(None) == most
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [f"threads = {most + 5}"]


def test_each_work_unit_is_computed_once():
    for n_threads in (1, 2, 3, 7, 8, 9, 17):
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


@ir.expose(types.void, types.int64)
def pause_us(b: ir.Builder, microseconds: ir.Value) -> None:
    """Sleep, as a thread does that the system has set aside."""
    ir.call(b, "usleep", ir.I32, b.trunc(microseconds, ir.I32))


CHAIN = record("own", "all", "out", "delays")


@kernel
def chain(args: int, run: int, thread: int, n_threads: int) -> None:
    """Combine this share's last number with all numbers before the last barrier."""
    a = carray(simd.pointer(args), 1, CHAIN)[0]
    delay = carray(simd.pointer(a.delays), n_threads, np.int64)[thread]
    if delay:
        pause_us(delay)
    total = 7 * carray(simd.pointer(a.own), n_threads, np.int64)[thread] + thread
    for i, number in enumerate(carray(simd.pointer(a.all), n_threads, np.int64)):
        total += (i + 1) * number
    carray(simd.pointer(a.out), n_threads, np.int64)[thread] += total


class Chain:
    """Table of `chain` steps, with the results that they must have.

    These are others if a share runs twice, early or not at all.
    """

    def __init__(self, n_threads: int, barriers: list[bool], delays: np.ndarray):
        self.numbers = np.zeros((len(barriers) + 1, n_threads), np.int64)
        self.table, self.run = np.zeros(len(barriers), STEP), np.zeros(1, RUN)
        self.expected = np.zeros_like(self.numbers)
        self.args, self.delays, last = np.zeros(len(barriers), CHAIN), delays, 0
        for i, barrier in enumerate(barriers):
            rows = {"own": i, "all": last, "out": i + 1}
            for name, row in rows.items():
                self.args[i][name] = self.numbers[row].ctypes.data
            self.args[i]["delays"] = delays[i].ctypes.data
            self.table[i] = chain.address, self.args[i : i + 1].ctypes.data, barrier
            weighted = (np.arange(1, n_threads + 1) * self.expected[last]).sum()
            self.expected[i + 1] = 7 * self.expected[i] + np.arange(n_threads) + weighted
            last = i + 1 if barrier else last

    def check(self, team: Team) -> None:
        self.numbers[:] = 0
        team.run(self.table.ctypes.data, 0, len(self.table), self.run.ctypes.data)
        assert (self.numbers == self.expected).all()


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(n) for n in (1, 2, 3, 5, 8, 9, 20)]
    yield teams
    for team in teams:
        team.close()


@pytest.mark.skipif(os.name != "posix", reason="needs usleep")
@examples(100)
@given(st.data())
def test_each_share_runs_once_and_in_order_under_random_delays(teams, data):
    team = data.draw(st.sampled_from(teams))
    barriers = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    delays = data.draw(st.sampled_from([[0], [0, 0, 0, 1], [0, 0, 20, 100], [0] * 20 + [2000]]))
    random_delays = np.random.default_rng(data.draw(st.integers(0, 99)))
    steps = Chain(team.n_threads, barriers, random_delays.choice(delays, (len(barriers), team.n_threads)))
    for _ in range(5):
        steps.check(team)


@pytest.mark.parametrize("n_threads", [4, 19])
def test_one_thread_takes_over_the_shares_of_absent_ones(n_threads, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    team = Team(n_threads)
    barriers = [True, False, True, True] * 10
    Chain(n_threads, barriers, np.zeros((40, n_threads), np.int64)).check(team)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_workers_are_bound_to_the_nodes_of_their_shares(monkeypatch):
    def masks() -> list[set[int]]:
        found = {thread.name: thread.native_id for thread in threading.enumerate() if thread not in before}
        return [os.sched_getaffinity(found[name]) for name in sorted(found)]

    before, mine = threading.enumerate(), os.sched_getaffinity(0)
    first, last = min(mine), max(mine)
    nodes = [Node(0, (first,), (first,)), Node(1, (last,), (last,))]
    monkeypatch.setattr("llamacli.kernels.team.numa_nodes", lambda: nodes)
    team = Team(4)
    assert [node.number for node in team.nodes] == [0, 0, 1, 1]
    assert not sums(team, 50).any()
    assert masks() == [{first}, {last}, {last}]
    assert os.sched_getaffinity(0) == mine, "the caller's thread stays free"
    team.close()
    monkeypatch.setattr("llamacli.kernels.team.numa_nodes", lambda: nodes[:1])
    before, team = threading.enumerate(), Team(3)
    assert not sums(team, 50).any()
    assert (team.nodes, masks()) == ((), [mine, mine]), "with one node nothing is bound"
    team.close()


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_default_threads_of_a_process_with_one_cpu():
    program = "from llamacli.kernels.team import check_threads; print(check_threads(None))"
    cpu = min(os.sched_getaffinity(0))
    for setting, expected in (("", "1"), ("3", "3")):
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}]); {program}"],
            env=os.environ | {VARIABLE: setting}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == expected


@pytest.mark.medium
@pytest.mark.skipif(os.name != "posix", reason="needs usleep")
def test_threads_that_wait_for_a_set_aside_one_sleep():
    team = Team(3)
    delays = np.zeros((6, 3), np.int64)
    delays[:, 1] = 100_000
    steps = Chain(3, [True] * 6, delays)
    used = time.process_time()
    steps.check(team)
    assert time.process_time() - used < 0.3  # threads that spin need twice the 0.6 s of all delays
    team.close()


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
        with loaded.create_session(n_ctx=200) as session:
            expected = [1, *(token.id for token in session.generate([1], max_tokens=151, ignore_eos=True))]
        until, interrupts = time.monotonic() + 5 / STRIDE, 0
        while time.monotonic() < until:
            session = loaded.create_session(n_ctx=200)

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


SPINNING = """
import time
from llamacli.kernels import team
team._SPIN_US = dict.fromkeys(team._SPIN_US, 6e7)
one = team.Team(2)
time.sleep(0.2)
"""


def test_a_process_ends_while_workers_run_code():
    """Their code stays while the interpreter deletes its modules."""
    done = subprocess.run([sys.executable, "-c", SPINNING], check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's figures of threads")
def test_idle_workers_sleep():
    def threads() -> set[Path]:
        return set(Path("/proc/self/task").iterdir())

    def wakes(workers: set[Path]) -> tuple[int, int]:
        """Clock ticks of CPU time, and context switches."""
        ticks = [worker.joinpath("stat").read_text().rpartition(")")[2].split()[11:13] for worker in workers]
        lines = [line for worker in workers for line in worker.joinpath("status").read_text().splitlines()]
        switches = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
        return sum(int(own) + int(system) for own, system in ticks), sum(switches)

    others = threads()  # those of servers that other tests have started wake up now and then
    team = Team(4)
    assert not sums(team, 5).any()
    workers = threads() - others
    assert len(workers) == 3
    used = wakes(workers)
    for _ in range(20):
        time.sleep(0.2)
        now = wakes(workers)
        idle, used = (now[0] == used[0] and now[1] <= used[1] + 2), now
        if idle:
            break
    assert idle, "idle workers wake up"
    assert not sums(team, 5).any()
    team.close()


@pytest.mark.medium
def test_text_does_not_depend_on_the_number_of_threads(model):
    expected = generate(model)
    assert expected.returncode == 0, expected.stderr
    assert generate(model, 3).stdout == expected.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", isa.available())
def test_text_does_not_depend_on_the_instruction_set(name, model):
    done = generate(model, LLAMACLI_ISA=name)
    assert (done.returncode, done.stdout) == (0, generate(model).stdout), done.stderr

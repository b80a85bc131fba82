"""Thread pool that runs tables of kernel steps.

A program is a table of steps, divided by barriers into phases. The work of a phase is divided into as many shares as
the team has threads: a share is the part of every step of the phase that its number stands for, whichever thread
computes it, so results do not depend on that. All of it is compiled code without the GIL: between steps the only
dispatch is a call through a pointer.

A thread claims a share by a compare-and-swap of the share's claim word, which holds the last phase that it was claimed
in. Each thread begins with the share of its own number, and at a barrier, after a short spin, takes over shares that
late threads have not begun (work stealing). The thread that ends the last share of a phase publishes the next one, so
that a thread which the system has set aside delays the others by the share that it is in at most. Undisturbed, a
barrier costs about a tenth of a microsecond. Numba's own parallel loops would cost one to two microseconds a step with
OpenMP and eighty without it.

Shares that have ended are counted in groups of eight, and the groups that have ended in one word (a combining tree), as
atomic additions to one word are executed one after the other: 64 of them would take some microseconds.

With several NUMA nodes, neighbouring shares belong to one node, and each worker is bound to the node of its share, so
that what it reads again and again can lie there. Thread 0 is the caller's and stays where the system puts it.

Threads that wait spin for some microseconds and then sleep on a condition variable: the core is then free for the
thread that the others wait for, and a thread that has slept is soon given a core again. `sched_yield` would be worse,
as Linux (EEVDF) lets a thread that yields wait for a whole time slice. Between jobs threads spin for longer, since the
next token usually comes soon. Publishing a job, waking sleepers and computing shares is one call, and a worker's loop
is another. A KeyboardInterrupt is raised between calls only, so it cannot lose a job.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.kernels import ir
from llamacli.kernels.deferred import njit, types
from llamacli.kernels.isa import architecture, target
from llamacli.kernels.jit import Compiled, Kernel
from llamacli.kernels.layout import AHEAD, RUN, record
from llamacli.util.locking import fork_safe
from llamacli.util.numa import Node, bind_thread, numa_nodes, thread_nodes
from llamacli.util.numbers import is_integer
from llamacli.util.settings import MAX_THREADS
from llamacli.util.system import usable_cores

STEP = record("function", "args", "barrier")
"""Table entry: the kernel's address, its record's address, and a flag for a barrier before the next step."""

VARIABLE = "LLAMACLI_THREADS"
"""Environment variable with the default number of threads."""

_log = logging.getLogger(__name__)
_i64 = types.int64

# A team's shared state, int64 words. Words written by different threads lie on different cache lines; a lock and a
# condition of the system's take less than two lines each. From _CLAIMS on there is a line for each share, then one for
# each group of shares. The phase's word holds its number and its first step, so that one store publishes both.
_STEPS, _STOP, _RUN, _TAKE_AFTER, _TAKE_AGAIN_AFTER, _SLEEP_AFTER, _IDLE_AFTER = range(7)
_PHASE, _DONE, _FINISHED, _SLEEPERS, _LOCK, _CONDITION, _CLAIMS, _CLAIM_WORDS = 8, 16, 24, 32, 40, 56, 72, 8
_FIRST_STEP_BITS = 16
_GROUP = 8
"""Shares whose ends are counted in one word; the words of groups are counted in another if there are several."""

_SPIN_US = {_TAKE_AFTER: 5.0, _TAKE_AGAIN_AFTER: 0.3, _SLEEP_AFTER: 50.0, _IDLE_AFTER: 100.0}
"""Microseconds after which a waiting thread takes over shares, does so if it did at the last barrier, sleeps, and
sleeps between jobs."""

_QUIT = -1


def compiled(signature: str) -> Callable[[Callable[..., Any]], Compiled]:
    """Decorate a function that Python calls with addresses and numbers."""
    return lambda function: Compiled(function, signature)


@ir.expose(types.void, _i64, _i64, _i64, _i64, _i64)
def _call(b: ir.Builder, function: ir.Value, args: ir.Value, run: ir.Value, thread: ir.Value, n: ir.Value) -> None:
    kind = ir.ir.FunctionType(ir.ir.VoidType(), [ir.I64] * 4)
    b.call(b.inttoptr(function, kind.as_pointer()), [args, run, thread, n])


@ir.expose(_i64, _i64)
def _atomic_load(b: ir.Builder, address: ir.Value) -> ir.Value:
    return b.load_atomic(b.inttoptr(address, ir.I64.as_pointer()), "seq_cst", 8)


@ir.expose(types.void, _i64, _i64)
def _atomic_store(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    b.store_atomic(value, b.inttoptr(address, ir.I64.as_pointer()), "seq_cst", 8)


@ir.expose(types.void, _i64, _i64)
def _store(b: ir.Builder, address: ir.Value, value: ir.Value) -> None:
    """Store a word that a later `_atomic_store` or `_atomic_add` publishes."""
    b.store_atomic(value, b.inttoptr(address, ir.I64.as_pointer()), "monotonic", 8)


@ir.expose(_i64, _i64, _i64)
def _atomic_add(b: ir.Builder, address: ir.Value, value: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(address, ir.I64.as_pointer()), value, "seq_cst")


@ir.expose(_i64, _i64, _i64, _i64)
def _compare_exchange(b: ir.Builder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Replace a word if it is as expected; 1 if it was."""
    pair = b.cmpxchg(b.inttoptr(address, ir.I64.as_pointer()), expected, value, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(pair, 1), ir.I64)


@ir.expose(types.void)
def _pause(b: ir.Builder) -> None:
    if architecture(target()[0]) == "x86_64":
        ir.call(b, "llvm.x86.sse2.pause", ir.ir.VoidType())


def _system(b: ir.Builder, posix: str, windows: str, *addresses: ir.Value) -> None:
    name, result = (posix, ir.I32) if os.name == "posix" else (windows, ir.ir.VoidType())
    if name:
        ir.call(b, name, result, *(b.inttoptr(address, ir.I8.as_pointer()) for address in addresses))


@ir.expose(types.void, _i64)
def _prepare_lock(b: ir.Builder, lock: ir.Value) -> None:
    _system(b, "pthread_mutex_init", "", lock, ir.I64(0))


@ir.expose(types.void, _i64)
def _prepare_condition(b: ir.Builder, condition: ir.Value) -> None:
    _system(b, "pthread_cond_init", "", condition, ir.I64(0))


@ir.expose(types.void, _i64)
def _acquire(b: ir.Builder, lock: ir.Value) -> None:
    _system(b, "pthread_mutex_lock", "AcquireSRWLockExclusive", lock)


@ir.expose(types.void, _i64)
def _release(b: ir.Builder, lock: ir.Value) -> None:
    _system(b, "pthread_mutex_unlock", "ReleaseSRWLockExclusive", lock)


@ir.expose(types.void, _i64)
def _signal(b: ir.Builder, condition: ir.Value) -> None:
    _system(b, "pthread_cond_broadcast", "WakeAllConditionVariable", condition)


@ir.expose(types.void, _i64, _i64)
def _wait(b: ir.Builder, condition: ir.Value, lock: ir.Value) -> None:
    """Release the lock and wait for a signal (wakeups may be spurious)."""
    if os.name == "posix":
        _system(b, "pthread_cond_wait", "", condition, lock)
    else:
        condition, lock = (b.inttoptr(address, ir.I8.as_pointer()) for address in (condition, lock))
        ir.call(b, "SleepConditionVariableSRW", ir.I32, condition, lock, ir.I32(-1), ir.I32(0))


@njit
def _phase(state: int) -> int:
    return _atomic_load(state + 8 * _PHASE) >> _FIRST_STEP_BITS


@njit
def _wake(state: int) -> None:
    if _atomic_load(state + 8 * _SLEEPERS):
        _acquire(state + 8 * _LOCK)
        _signal(state + 8 * _CONDITION)
        _release(state + 8 * _LOCK)


@njit
def _claim(state: int, share: int, phase: int) -> bool:
    """Claim a share; False if it is claimed or the phase over."""
    claim = state + 8 * (_CLAIMS + _CLAIM_WORDS * share)
    return _atomic_load(claim) == phase - 1 and _compare_exchange(claim, phase - 1, phase) != 0


@njit
def _compute(state: int, share: int, n_threads: int, phase: int) -> None:
    """Compute a claimed share; the last to end publishes the next phase."""
    # A claimed share keeps the job and the phase from ending: their words are this phase's.
    steps, stop, run = (
        _atomic_load(state + 8 * _STEPS),
        _atomic_load(state + 8 * _STOP),
        _atomic_load(state + 8 * _RUN),
    )
    i, meets = _atomic_load(state + 8 * _PHASE) & ((1 << _FIRST_STEP_BITS) - 1), False
    while i < stop and not meets:
        step = steps + 24 * i
        _call(_atomic_load(step), _atomic_load(step + 8), run, share, n_threads)
        meets = _atomic_load(step + 16) != 0
        i += 1
    expected = n_threads
    if n_threads > _GROUP:
        group, expected = share // _GROUP, (n_threads + _GROUP - 1) // _GROUP
        ended = state + 8 * (_CLAIMS + _CLAIM_WORDS * (n_threads + group))
        if _atomic_add(ended, 1) < min(_GROUP, n_threads - _GROUP * group) - 1:
            return
        _store(ended, 0)
    if _atomic_add(state + 8 * _DONE, 1) < expected - 1:
        return
    _store(state + 8 * _DONE, 0)
    if i < stop:
        _atomic_store(state + 8 * _PHASE, ((phase + 1) << _FIRST_STEP_BITS) + i)
    else:
        _atomic_store(state + 8 * _FINISHED, phase)
    _wake(state)


@njit
def _take_over(state: int, thread: int, n_threads: int, phase: int) -> bool:
    """Compute a phase's shares that no thread has begun; True if any."""
    taken = False
    for i in range(1, n_threads):
        share = (thread + i) % n_threads
        if _claim(state, share, phase):
            _compute(state, share, n_threads, phase)
            taken = True
    return taken


@njit
def _sleep(state: int, thread: int, phase: int) -> None:
    """Sleep until another phase is published, thread 0 until the job ends."""
    # A thread counts itself as a sleeper before it looks again; phases are published before sleepers are counted: one
    # of the two sees the other.
    _acquire(state + 8 * _LOCK)
    _atomic_add(state + 8 * _SLEEPERS, 1)
    while _phase(state) == phase and (thread or _atomic_load(state + 8 * _FINISHED) != phase):
        _wait(state + 8 * _CONDITION, state + 8 * _LOCK)
    _atomic_add(state + 8 * _SLEEPERS, -1)
    _release(state + 8 * _LOCK)


@njit
def _work(state: int, thread: int, n_threads: int) -> None:
    """Compute shares: thread 0 until the job ends, others until they quit."""
    seen, spins, patience = 0, 0, _atomic_load(state + 8 * _TAKE_AFTER)
    while True:
        phase = _phase(state)
        if phase != seen:
            if _atomic_load(state + 8 * _STOP) == _QUIT:
                return
            seen, spins = phase, 0
            if _claim(state, thread, phase):
                _compute(state, thread, n_threads, phase)
                continue
        finished = _atomic_load(state + 8 * _FINISHED) == phase
        if finished and not thread:
            return
        _pause()
        spins += 1
        if spins == patience:
            # One look is enough: shares of a phase are begun and never given back.
            taken = _take_over(state, thread, n_threads, phase)
            patience = _atomic_load(state + 8 * (_TAKE_AGAIN_AFTER if taken else _TAKE_AFTER))
        if spins > _atomic_load(state + 8 * (_IDLE_AFTER if finished else _SLEEP_AFTER)):
            _sleep(state, thread, phase)
            spins = 0


@compiled("int64(int64, int64)")
def _spin(address: int, n: int) -> int:
    """Spin n times, as a waiting thread does."""
    total = 0
    for _ in range(n):
        _pause()
        total += _atomic_load(address)
    return total


@compiled("void(int64)")
def _prepare(state: int) -> None:
    _prepare_lock(state + 8 * _LOCK)
    _prepare_condition(state + 8 * _CONDITION)


@compiled(f"void({', '.join(['int64'] * 6)})")
def _run_job(state: int, steps: int, start: int, stop: int, run: int, n_threads: int) -> None:
    """Publish a job, wake sleepers, and compute shares until all are done.

    One call, so that no interrupt comes in between.
    """
    if n_threads == 1:
        for i in range(start, stop):
            _call(_atomic_load(steps + 24 * i), _atomic_load(steps + 24 * i + 8), run, 0, 1)
        return
    if start >= stop and stop != _QUIT:
        return
    _store(state + 8 * _STEPS, steps)
    _store(state + 8 * _STOP, stop)
    _store(state + 8 * _RUN, run)
    _atomic_store(state + 8 * _PHASE, ((_phase(state) + 1) << _FIRST_STEP_BITS) + start)
    _wake(state)
    if stop != _QUIT:
        _work(state, np.int64(0), n_threads)  # a literal would be another type, for which all is compiled again


@compiled("void(int64, int64, int64)")
def _worker_loop(state: int, thread: int, n_threads: int) -> None:
    _work(state, thread, n_threads)


class Team:
    """Team of `n_threads` threads, the caller's included.

    One job runs at a time; other callers wait for the lock. `nodes` are the NUMA nodes of the threads, empty if all
    have one.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self.nodes = thread_nodes(n_threads, numa_nodes())
        self.lock = fork_safe(threading.RLock())
        self._pid = 0
        self._start_workers()

    def run(self, steps: int, start: int, stop: int, run: int) -> None:
        """Run steps `start` to `stop` - 1; `steps` and `run` are addresses."""
        assert stop < 1 << _FIRST_STEP_BITS, f"a table of {stop} steps is longer than a phase's word can hold"
        with self.lock:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._start_workers()
            _run_job.call(self._state, steps, start, stop, run, self.n_threads)

    def close(self) -> None:
        """Stop the worker threads."""
        with self.lock:
            if self._pid == os.getpid() and self.n_threads > 1:
                _run_job.call(self._state, 0, 0, _QUIT, 0, self.n_threads)
            self._pid = 0

    def _start_workers(self) -> None:
        """Start the workers on a state of their own.

        Workers of a start that an interrupt broke off keep the old state and never see a job.
        """
        n_lines = self.n_threads + -(-self.n_threads // _GROUP)
        words = np.zeros(_CLAIMS + _CLAIM_WORDS * n_lines, np.int64)
        for word, microseconds in _SPIN_US.items():
            words[word] = microseconds * _spins_per_us()
        self._memory, self._state = words, words.ctypes.data
        _prepare.call(self._state)
        for thread in range(1, self.n_threads):
            node = self.nodes[thread] if self.nodes else None
            arguments = (_worker_loop.call, words, thread, self.n_threads, node)  # linked here, where it may raise
            threading.Thread(target=_worker, args=arguments, name=f"llamacli-{thread}", daemon=True).start()
        self._pid = os.getpid()


@functools.cache
def _spins_per_us() -> float:
    """Spins of a waiting thread in a microsecond.

    The CPU's hint for spin loops takes 10 to 150 cycles.
    """
    word, n, seconds = np.zeros(1, np.int64), 1000, math.inf
    for _ in range(5):  # the fastest, which was not interrupted
        started = time.perf_counter()
        _spin.call(word.ctypes.data, n)
        seconds = min(seconds, time.perf_counter() - started)
    return n / (1e6 * seconds)


def _worker(
    loop: Callable[[int, int, int], None], words: np.ndarray[Any, Any], thread: int, n_threads: int, node: Node | None
) -> None:
    if node is not None:
        bind_thread(node)
    loop(words.ctypes.data, thread, n_threads)


def run_kernel(
    team: Team,
    kernel: Kernel,
    record: np.dtype[np.void],
    *,
    n_rows: int = 0,
    first_row: int = 0,
    rows: np.ndarray[Any, Any] | None = None,
    ahead: int = AHEAD,
    **params: object,
) -> None:
    """Run one kernel on a team of threads.

    `record` is the dtype of its parameters, `params` their values by name; arrays are passed as their addresses. Rows
    `first_row` to `n_rows` - 1 are computed; `rows` is an array of `llamacli.kernels.layout.ROW`, one for each token;
    `ahead` is the prefetch distance of RUN.
    """
    args, run, steps = np.zeros(1, record), np.zeros(1, RUN), np.zeros(1, STEP)
    for name, value in params.items():
        args[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    run["n_rows"], run["first_row"], run["rows"] = n_rows, first_row, 0 if rows is None else rows.ctypes.data
    run["ahead"] = ahead
    steps["function"], steps["args"] = kernel.address, args.ctypes.data
    team.run(steps.ctypes.data, 0, 1, run.ctypes.data)


def check_threads(threads: int | None) -> int:
    """Number of threads to use.

    By default that of the environment variable LLAMACLI_THREADS, else the usable cores. The load of the machine does
    not lower it: threads take over the work of one that waits for a core, so fewer of them are no faster. More threads
    than cores are allowed, with a warning. Raises InvalidRequestError if `threads` is not an integer from 1 to
    MAX_THREADS.
    """
    if threads is None:
        given = os.environ.get(VARIABLE, "")
        if not given:
            return usable_cores().threads
        if not given.isdecimal() or not 1 <= int(given) <= MAX_THREADS:
            raise InvalidRequestError(f"{VARIABLE} = {given!r} is not a whole number from 1 to {MAX_THREADS}")
        threads = int(given)
    if not is_integer(threads) or not 1 <= threads <= MAX_THREADS:
        raise InvalidRequestError(f"threads = {threads!r} is not a whole number from 1 to {MAX_THREADS}")
    _warn_of_crowding(int(threads))
    return int(threads)


@functools.cache
def _warn_of_crowding(threads: int) -> None:
    most = usable_cores().threads
    if threads > most:
        _log.warning("threads = %d, but this process may use %d cores: more threads are slower", threads, most)


assert ctypes.sizeof(ctypes.c_void_p) == 8, "kernels need 64-bit addresses"

"""The threads that run kernels.

A program is a table of steps. Every thread of the team walks it from the same start to the same end, doing its share of
each step, and waits for the others only where a step asks for it. The walk is one call that holds no lock of Python's:
between steps there is no dispatch but a call through a pointer, and a barrier costs about a tenth of a microsecond.
Numba's own parallel loops would cost one to two microseconds a step with OpenMP and eighty without it.

Idle workers spin for about a millisecond, since the next token usually comes sooner, and then sleep.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from llamacli.errors import InvalidRequestError
from llamacli.kernels import ir
from llamacli.kernels.isa import features
from llamacli.kernels.jit import Compiled, record

STEP = record("function", "args", "barrier")
"""One step: the kernel's address, its record's address, and whether all threads must be done before the next step."""

_i64 = types.int64

# A team's shared state, int64 words. What different threads write lies on different cache lines.
_JOB, _STEPS, _START, _STOP, _RUN, _ARRIVED, _PHASE, _ASLEEP = 0, 8, 9, 10, 11, 16, 24, 32
_WORDS_A_WORKER = 8
_SPINS_BEFORE_YIELD, _SPINS_BEFORE_SLEEP = 300, 20000
_QUIT = -1

_NAP = 0.05
"""Seconds after which a sleeping worker looks for a job by itself: one that fell asleep after the others were woken, or
whose waking was interrupted, is missed for no longer."""


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Compiled]:
    """Decorate a function that Python calls by addresses and numbers."""
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


@ir.expose(_i64, _i64, _i64)
def _atomic_add(b: ir.Builder, address: ir.Value, value: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", b.inttoptr(address, ir.I64.as_pointer()), value, "seq_cst")


@ir.expose(types.void)
def _pause(b: ir.Builder) -> None:
    """Tell the core that this is a spin loop."""
    if "sse2" in features():
        ir.call(b, "llvm.x86.sse2.pause", ir.ir.VoidType())


@ir.expose(types.void)
def _yield(b: ir.Builder) -> None:
    """Let another thread have this core."""
    if os.name == "posix":
        ir.call(b, "sched_yield", ir.I32)


@njit
def _barrier(state: int, n_threads: int) -> None:
    phase = _atomic_load(state + 8 * _PHASE)
    if _atomic_add(state + 8 * _ARRIVED, 1) == n_threads - 1:
        _atomic_store(state + 8 * _ARRIVED, 0)
        _atomic_store(state + 8 * _PHASE, phase + 1)
        return
    spins = 0
    while _atomic_load(state + 8 * _PHASE) == phase:
        _pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield()


@njit
def _walk(state: int, thread: int, n_threads: int) -> None:
    steps, run = _atomic_load(state + 8 * _STEPS), _atomic_load(state + 8 * _RUN)
    for i in range(_atomic_load(state + 8 * _START), _atomic_load(state + 8 * _STOP)):
        step = steps + 24 * i
        _call(_atomic_load(step), _atomic_load(step + 8), run, thread, n_threads)
        if n_threads > 1 and _atomic_load(step + 16):
            _barrier(state, n_threads)
    if n_threads > 1:
        _barrier(state, n_threads)


@compiled(types.void(*[_i64] * 6))
def _lead(state: int, steps: int, start: int, stop: int, run: int, n_threads: int) -> None:
    """Give the team a job and do thread 0's part: one call, so that no interrupt comes in between."""
    _atomic_store(state + 8 * _STEPS, steps)
    _atomic_store(state + 8 * _START, start)
    _atomic_store(state + 8 * _STOP, stop)
    _atomic_store(state + 8 * _RUN, run)
    _atomic_add(state + 8 * _JOB, 1)
    if stop != _QUIT:
        _walk(state, 0, n_threads)


@compiled(_i64(*[_i64] * 4))
def _work(state: int, done: int, thread: int, n_threads: int) -> int:
    """A worker's loop: walk each job after number `done` till none comes for a while; returns the last one's number."""
    asleep = state + 8 * (_ASLEEP + _WORDS_A_WORKER * thread)
    spins = 0
    while True:
        job = _atomic_load(state + 8 * _JOB)
        if job != done:
            if _atomic_load(state + 8 * _STOP) == _QUIT:
                return _QUIT
            _walk(state, thread, n_threads)
            done, spins = job, 0
            continue
        _pause()
        spins += 1
        if spins > _SPINS_BEFORE_SLEEP:
            # Announce the sleep, then look once more: a job posted in between must not be missed.
            _atomic_store(asleep, 1)
            if _atomic_load(state + 8 * _JOB) == done:
                return done
            _atomic_store(asleep, 0)
            spins = 0


class Team:
    """`n_threads` threads, the caller's included. One job runs at a time; other callers wait their turn."""

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self.lock = threading.RLock()
        self._pid = 0
        self._start_workers()

    def run(self, steps: np.ndarray[Any, Any], start: int, stop: int, run: np.ndarray[Any, Any]) -> None:
        """Walk steps `start` to `stop` - 1 of a table; `run` is their shared record."""
        with self.lock:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._start_workers()
            self._wake()
            _lead.call(self._state, steps.ctypes.data, start, stop, run.ctypes.data, self.n_threads)

    def close(self) -> None:
        """End the worker threads."""
        with self.lock:
            if self._pid == os.getpid() and self.n_threads > 1:
                self._wake()
                _lead.call(self._state, 0, 0, _QUIT, 0, self.n_threads)
            self._pid = 0

    def _start_workers(self) -> None:
        self._pid = os.getpid()
        words = np.zeros(_ASLEEP + _WORDS_A_WORKER * (self.n_threads + 1), np.int64)
        self._memory, self._state = words, words.ctypes.data
        self._wakers = [threading.Semaphore(0) for _ in range(1, self.n_threads)]
        for thread, waker in enumerate(self._wakers, start=1):
            arguments = (words, thread, self.n_threads, waker)
            threading.Thread(target=_worker, args=arguments, name=f"llamacli-{thread}", daemon=True).start()

    def _wake(self) -> None:
        for thread, waker in enumerate(self._wakers, start=1):
            asleep = _ASLEEP + _WORDS_A_WORKER * thread
            if self._memory[asleep]:
                self._memory[asleep] = 0
                waker.release()


def _worker(words: np.ndarray[Any, Any], thread: int, n_threads: int, waker: threading.Semaphore) -> None:
    done = 0
    while True:
        done = _work.call(words.ctypes.data, done, thread, n_threads)
        if done == _QUIT:
            return
        waker.acquire(timeout=_NAP)


def usable_cores() -> int:
    """The physical cores that this process may run on, at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not every system can say
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        siblings = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(siblings) as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def check_threads(threads: int | None) -> int:
    """The number of threads to use: `threads`, or by default all usable cores.

    Raises InvalidRequestError if it is not from 1 to the number of CPUs that this process may use.
    """
    if threads is None:
        return usable_cores()
    try:
        most = len(os.sched_getaffinity(0))
    except AttributeError:
        most = os.cpu_count() or 1
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise InvalidRequestError(f"threads = {threads!r} is not a number from 1 to {most}, the CPUs that there are")
    return threads


assert ctypes.sizeof(ctypes.c_void_p) == 8, "kernels need 64-bit addresses"

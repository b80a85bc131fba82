"""Pool of helper processes for templates, which limit their time and memory.

A template that comes with a file may keep C code busy where no check in Python sees it: comparing lists that share
their parts, copying large ones, multiplying bytes. So it is rendered in a process that can be ended. Helpers are kept,
and each has one job at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamacli.chat.rendering import MAX_TEXT, execute
from llamacli.errors import InvalidRequestError

_log = logging.getLogger(__name__)

MAX_WAIT = 10.0
"""Seconds on the clock that a rendering may take; CPU time is limited in the helper."""

_MAX_START = 20.0
"""Seconds on the clock until a helper must have started."""

_SLICE = 0.1
"""Seconds after which an interrupt is noticed that came to another thread."""

_MAX_IDLE, _MAX_HELPERS = 2, 4
_PACKAGES = ("llamacli", "jinja2", "markupsafe")


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a rendering job in a helper process.

    Where the system has none (no POSIX, no Python executable), the job is executed in this process, with the checks of
    the environment alone; a warning tells so once. Returns what `rendering.execute` does, the limit exceeded as an
    error. Raises InvalidRequestError for values that are not JSON data.
    """
    try:
        line = json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages, tools and variables of a chat must be JSON data: {error}") from None
    with _pool.slots:
        helper = _pool.take()
        if helper is None:
            try:
                return execute(json.loads(line))
            except MemoryError:
                return _failure("not enough memory")
        try:
            answer = helper.ask(line, float(job["seconds"]))
        except BaseException:  # an interrupt too: the helper may be busy
            helper.end()
            raise
        if "broken" in answer:
            return _failure(answer["broken"])
        if helper.is_last:
            helper.end()
        else:
            _pool.give(helper)
        return answer


def _failure(reason: str) -> dict[str, Any]:
    return {"error": reason, "line": None, "failed": "rendered", "limit": True}


class _Helper:
    """A helper process, with the pipes to it."""

    def __init__(self) -> None:
        places = {str(Path(str(spec.origin)).parents[1]) for spec in map(importlib.util.find_spec, _PACKAGES) if spec}
        code = f"import sys; sys.path[:0] = {sorted(places)!r}; from llamacli.chat.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._is_ready = self.is_last = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> bool:
        """Wait until the process has started; False if it cannot."""
        if not self._is_ready:
            self._is_ready = self._exchange(b"", _MAX_START, 64) is not None
        return self._is_ready

    def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Send a job and wait for its answer.

        `seconds` is its limit of CPU time. Where there is no answer, "broken" has the reason.
        """
        found = self._exchange(line, MAX_WAIT, 4 * (MAX_TEXT + len(line)) + (1 << 20))
        if found is not None:
            self.is_last = found.endswith(b" \n")  # `worker.LAST`
            answer: dict[str, Any] = json.loads(found.decode("utf-8", "surrogatepass"))
            return answer
        waited = self.process.poll() is None and not self._wait(0.2)
        self.end()
        if waited:
            return {"broken": f"it takes more than {MAX_WAIT:g} s on the clock"}
        ended_by = -self.process.returncode
        if ended_by in (signal.SIGPROF, signal.SIGXCPU):
            return {"broken": f"it takes more than {seconds:g} s"}
        name = signal.Signals(ended_by).name if ended_by in signal.valid_signals() else f"status {-ended_by}"
        return {"broken": f"the process that renders it ended ({name})"}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _wait(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def _exchange(self, data: bytes, seconds: float, limit: int) -> bytes | None:
        """Send data and receive a line.

        None if the process ends, is late or writes more than `limit` bytes.
        """
        deadline = time.monotonic() + seconds
        received: list[bytes] = []
        unsent = memoryview(data)
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if data:
            poll.register(self._in, select.POLLOUT)
        while sum(map(len, received)) <= limit:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for fd, _ in poll.poll(min(left, _SLICE) * 1000):
                if fd == self._out:
                    piece = os.read(self._out, 1 << 20)
                    if not piece:
                        return None
                    received.append(piece)
                    if piece.endswith(b"\n"):
                        return b"".join(received)
                else:
                    try:
                        unsent = unsent[os.write(self._in, unsent) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        return None
                    if not unsent:
                        poll.unregister(self._in)
        return None


class _Pool:
    def __init__(self) -> None:
        self.slots = threading.BoundedSemaphore(_MAX_HELPERS)
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        is_frozen = getattr(sys, "frozen", False)  # then the executable is no Python
        self._works = sys.platform != "win32" and bool(sys.executable) and not is_frozen
        self._has_warned = False

    def take(self) -> _Helper | None:
        """Take an idle helper or start one; None where that fails."""
        while True:
            with self._lock:
                helper = self._idle.pop() if self._idle else None
            if helper is None:
                break
            if helper.is_alive:
                return helper
            helper.end()
        helper = self._started() if self._works else None
        if helper is None and not self._has_warned:
            self._has_warned = True
            _log.warning("no helper process can be started: chat templates run without limits of memory")
        return helper

    def give(self, helper: _Helper) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(helper)
                return
        helper.end()

    def end(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def forget(self) -> None:
        """Close the pipes to idle helpers, which belong to another process."""
        for helper in self._idle:
            helper.close()
            helper.process.returncode = 0  # not a child of this process
        self._idle.clear()

    def _started(self) -> _Helper | None:
        helper = None
        try:
            helper = _Helper()
            if helper.wait_ready():
                return helper
            self._works = False
            helper.end()
        except OSError:
            pass
        except BaseException:
            if helper is not None:
                helper.end()
            raise
        return None


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool.forget()
    _pool = _Pool()


atexit.register(lambda: _pool.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

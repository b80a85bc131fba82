"""Helper process that renders templates under limits of CPU time and memory.

Its imports are light. It reads a job in JSON from each line of stdin (`rendering.execute`) and writes the answer as a
line to stdout. It ends when stdin does, so it does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path

from llamacli.chat.rendering import execute

MAX_BYTES = 1 << 28
"""Memory that a rendering may take."""

_BYTES_PER_INPUT_BYTE = 64
"""Further memory for each byte of the job: long conversations take more."""

_MAX_KEPT = 1 << 26
"""Memory that a finished job may leave allocated; with more the process ends."""

_GRACE = 0.25
"""Seconds by which the signal comes after the deadline that the template's own loops check."""

LAST = b" \n"
"""End of an answer after which the process ends, as it has kept much memory."""

READY = b"ready\n"
"""Line that tells that jobs can be sent."""


def main() -> None:
    """Answer jobs until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process when it is interrupted
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE"):
        _set_limit(name, 0)
    n_before = _n_bytes()
    _write(READY)
    for line in sys.stdin.buffer:
        job = json.loads(line)
        _set_limit("RLIMIT_AS", n_before + MAX_BYTES + _BYTES_PER_INPUT_BYTE * len(line))
        _limit_time(job["seconds"] + _GRACE)
        try:
            answer = json.dumps(execute(job), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            reason = f"it takes more than {MAX_BYTES >> 20} MiB of memory"
            answer = json.dumps({"error": reason, "line": None, "failed": "rendered"}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = _n_bytes() - n_before > _MAX_KEPT
        _write(answer + (LAST if is_last else b"\n"))
        if is_last:
            break


def _limit_time(seconds: float) -> None:
    """Set a timer of CPU time whose signal ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _set_limit("RLIMIT_CPU", math.ceil(time.process_time() + seconds) + 1)


def _set_limit(name: str, value: int) -> None:
    """Lower a soft limit, if the system has it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


def _n_bytes() -> int:
    """Size of the address space, as RLIMIT_AS counts it; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]

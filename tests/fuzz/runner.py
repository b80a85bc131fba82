"""Parent process of the fuzzer: starts child processes, watches them, counts."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil

from fuzz.child import find_target, keep
from fuzz.watch import Watch

_START_SECONDS = 600.0
"""Seconds in which a child process must have started: it may compile kernels."""

_PATHS = [Path(__file__).parents[1], Path(__file__).parents[1] / "support"]
"""Folders of modules that targets import."""

_POLL_SECONDS = 0.02
_CLOCK_FACTOR = 12


@attrs.define
class Result:
    """Counts of a target, and the files of its findings.

    `n_slow` are cases that exceeded the limit of time once, but not when tried again alone.
    """

    target: str
    n_cases: int = 0
    n_refused: int = 0
    n_slow: int = 0
    slowest: float = 0.0
    growth: int = 0
    seconds: float = 0.0
    findings: set[Path] = attrs.field(factory=set)


@attrs.frozen
class _Ending:
    """Exit code of a child process, None if killed, and its output.

    `late`: it was killed because of a case that took too long.
    """

    code: int | None
    late: bool
    watch: Watch
    output: str


def fuzz(
    name: str,
    *,
    cases: int,
    seed: int,
    findings: Path,
    deadline: float | None = None,
    corpus: Path | None = None,
    by_hypothesis: bool = False,
) -> Result:
    """Try a number of cases of a target.

    It ends earlier at `deadline` (time.monotonic). `name` is as in `find_target`. With `corpus`, a folder, atheris
    makes the cases, `by_hypothesis` Hypothesis; else they are made of random numbers, which is faster.
    """
    target, result = find_target(name), Result(name.rpartition(":")[2])
    started = time.monotonic()
    before = {*findings.glob("*.txt")}
    n_left = cases
    for number in _numbers(deadline):
        n = min(target.per_process, n_left)
        if n <= 0:
            break
        options = ["--cases", str(n), "--seed", str(seed * 1_000_003 + number)]
        options += ["--corpus", str(corpus)] if corpus else ["--hypothesis"] if by_hypothesis else []
        ending = _run(name, findings, options, target.seconds, deadline)
        watch = ending.watch
        result.n_cases, result.n_refused = result.n_cases + watch.n_done, result.n_refused + watch.n_refused
        # Bytes of atheris from which the strategy makes no case count as well.
        n_left -= n if corpus and ending.code == 0 else watch.n_done + bool(watch.started)
        result.slowest, result.growth = max(result.slowest, watch.slowest), max(result.growth, watch.n_bytes)
        if watch.n_bytes > target.growth:
            details = f"by {watch.n_bytes >> 20} MiB in {watch.n_done} cases, with {' '.join(options)}"
            result.findings.add(keep(findings, result.target, watch.case, "memory grew", details))
        if ending.code == 0 or (ending.code is None and not watch.started):
            continue
        if not watch.started:
            raise RuntimeError(f"target {name} does not start, or ends without a case:\n{ending.output}")
        result.n_cases += 1
        hung = ending.code is None
        if hung and not ending.late:  # the time was over
            continue
        summary = f"more than {target.seconds} s" if hung else f"exit code {ending.code}"
        summary += f": {ending.output.strip().splitlines()[0]}" if ending.output.strip() else ""
        path = keep(findings, result.target, watch.case, f"{summary} {watch.case[:60]}", ending.output)
        if hung and not _hangs_alone(name, path, findings, target.seconds):
            if path not in result.findings:
                path.unlink()
            result.n_slow += 1
            continue
        result.findings.add(path)
    result.findings |= {path for path in findings.glob(f"{result.target}-*.txt") if path not in before}
    result.seconds = time.monotonic() - started
    return result


def _numbers(deadline: float | None) -> Iterator[int]:
    number = 0
    while deadline is None or time.monotonic() < deadline:
        yield number
        number += 1


def _is_late(process: psutil.Process, watch: Watch, seconds: float) -> bool:
    """Test that the current case takes too long.

    In CPU time or on the clock.
    """
    if not watch.started:
        return False
    times = process.cpu_times()
    return bool(
        times.user + times.system - watch.cpu > seconds or time.monotonic() - watch.started > _CLOCK_FACTOR * seconds
    )


def _hangs_alone(name: str, finding: Path, findings: Path, seconds: float) -> bool:
    """Test that a case exceeds the limit of time again.

    The machine may have been busy.
    """
    return _run(name, findings, ["--replay", str(finding)], seconds, None).late


def _run(name: str, findings: Path, options: list[str], seconds: float, deadline: float | None) -> _Ending:
    """Run a child process; kill it when a case takes too long."""
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory_folder()) as folder,
        tempfile.TemporaryFile() as output,
    ):
        watch = Watch(Path(folder) / "watch", create=True)
        command = [sys.executable, "-m", "fuzz.child", name, folder, str(findings.resolve()), *options]
        paths = os.pathsep.join([*map(str, _PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": paths}
        )
        started, late, running = time.monotonic(), False, psutil.Process(process.pid)
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                watch.read()
                now = time.monotonic()
                waits = not watch.n_done and not watch.started and now - started > _START_SECONDS
                late = _is_late(running, watch, seconds)
                if late or waits or (deadline is not None and now > deadline and watch.n_done):
                    break
            code = process.poll()
        finally:
            process.kill()
            process.wait()
        watch.read()
        output.seek(0)
        return _Ending(code, late, watch, output.read()[-20_000:].decode("utf-8", "replace"))


def _memory_folder() -> str | None:
    """Folder in memory, where the system has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

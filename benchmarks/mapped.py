#!/usr/bin/env python3
"""Measure generation from mapped weights under a limit of memory.

    python benchmarks/mapped.py FILE.gguf [-t N] [--tokens 8] [--share 0.5] [--turns 3] [--json OUT.json]

Each turn runs in processes of a memory cgroup with `--share` of the file's bytes, one after another: a plain read of
the file, which gives the disk's speed; llamacli with `load="map"`; llama.cpp with mmap, where `llama_cpp` is installed;
and llamacli with weights in memory, without a limit. Pages of the files leave the system's cache first. All evaluate
the same tokens, each another one than before, so that a mixture chooses other experts. Prints tokens a second, the
bytes that a token read from disk, and the speed in units of the bound: that of weights in memory, or the fastest read
divided by the bytes that a token has to read, if that is slower. It has to read the weights that the limit does not
hold, or what it did read, if these are fewer: a token of a mixture uses few experts. Needs root and a cgroup controller
of memory. Other programs on the machine falsify all but the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROMPT = [1, 2, 3]
MEMORY = "memory"


def read_bytes() -> int:
    """Bytes that this process has had read from disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def drop(path: Path) -> None:
    """Remove a file from the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(path: Path) -> dict[str, float]:
    """Speed of the disk in bytes a second."""
    started, before = time.perf_counter(), read_bytes()
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    return {"bytes/s": (read_bytes() - before) / (time.perf_counter() - started)}


def tokens_of(n: int) -> list[int]:
    """Token ids to evaluate."""
    return [100 + i * 31 % 5000 for i in range(n)]


def evaluate(path: Path, threads: int, n_tokens: int, load: str = "map") -> dict[str, float]:
    """Speed of llamacli, behind a prompt and a token."""
    import llamacli

    with llamacli.load_model(path, threads=threads, load=load) as model, model.create_session(n_ctx=256) as session:
        session.eval(PROMPT)
        return _timed(lambda token: session.eval([token]), n_tokens)


def evaluate_in_memory(path: Path, threads: int, n_tokens: int) -> dict[str, float]:
    """Speed of llamacli with weights in memory."""
    return evaluate(path, threads, n_tokens, "memory")


def evaluate_by_peer(path: Path, threads: int, n_tokens: int) -> dict[str, float]:
    """Speed of llama.cpp, behind a prompt and a token."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_threads=threads, n_threads_batch=threads, n_ctx=256, verbose=False)
    model.eval(PROMPT)
    return _timed(lambda token: model.eval([token]), n_tokens)


def _timed(evaluated: Callable[[int], object], n_tokens: int) -> dict[str, float]:
    first, *others = tokens_of(n_tokens + 1)
    evaluated(first)
    started, before = time.perf_counter(), read_bytes()
    for token in others:
        evaluated(token)
    seconds = time.perf_counter() - started
    return {"tokens/s": n_tokens / seconds, "bytes a token": (read_bytes() - before) / n_tokens}


KINDS = {"disk": read_plainly, MEMORY: evaluate_in_memory, "llamacli": evaluate, "llama.cpp": evaluate_by_peer}


def limited(limit: int | None, *arguments: str) -> dict[str, float] | None:
    """Run a kind of measurement in a cgroup; None if it fails."""
    group = None
    if limit is not None:
        is_v1 = (CGROUP / "memory").is_dir()
        group = (CGROUP / "memory" if is_v1 else CGROUP) / f"llamacli-mapped-{os.getpid()}"
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
    command = [sys.executable, __file__, "--child", str(group or ""), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        if group is not None:
            group.rmdir()
    if done.returncode:
        print(f"{arguments[0]}: ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(group: str, kind: str, path: str, *numbers: str) -> None:
    """Enter a cgroup, measure, and print the numbers."""
    if group:
        (Path(group) / "cgroup.procs").write_text("0")
    print(json.dumps(KINDS[kind](Path(path), *map(int, numbers))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from llamacli.engine.packed_copies import copies

    sizes = str(given.threads), str(given.tokens)
    if limited(None, "llamacli", str(given.file), str(given.threads), "1") is None:  # a packed copy is made
        sys.exit(1)
    copy = copies()[-1]
    limit = int(given.share * given.file.stat().st_size)
    print(f"limit {limit >> 20} MiB; file {given.file.stat().st_size >> 20} MiB, packed {copy.n_bytes >> 20} MiB")
    found = dict[str, list[dict[str, float]]]()
    for _ in range(given.turns):
        for kind in KINDS:
            drop(given.file)
            drop(copy.path)
            result = limited(
                None if kind == MEMORY else limit, kind, str(given.file), *(() if kind == "disk" else sizes)
            )
            if result is not None:
                print(f"{kind}: " + ", ".join(f"{value:.3g} {name}" for name, value in result.items()))
                found.setdefault(kind, []).append(result)
    fastest = max((result["bytes/s"] for result in found.pop("disk", [])), default=float("nan"))
    in_memory = statistics.median(result["tokens/s"] for result in found.pop(MEMORY))
    for kind, results in found.items():
        weights = copy.n_bytes if kind == "llamacli" else given.file.stat().st_size
        speed, read = (statistics.median(result[name] for result in results) for name in results[0])
        bound = min(in_memory, fastest / max(1.0, min(read, weights - limit)))
        print(f"{kind}: median {speed:.3g} tokens/s, {speed / bound:.2f} of the bound, {bound:.3g}")
    if len(found) == 2:
        pairs = zip(found["llamacli"], found["llama.cpp"], strict=False)
        ratio = statistics.median(ours["tokens/s"] / theirs["tokens/s"] for ours, theirs in pairs)
        print(f"llamacli in units of llama.cpp: {ratio:.2f}")
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

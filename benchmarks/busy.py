#!/usr/bin/env python3
"""Measure generation beside busy loops.

llamacli, other checkouts of it and llama.cpp take turns.

    python benchmarks/busy.py FILE.gguf -n 64 -r 5                          # beside 0, 1 and 2 busy loops
    python benchmarks/busy.py FILE.gguf --loops 0 4 -t 2 8                  # more threads than cores
    python benchmarks/busy.py FILE.gguf --other /tmp/before --no-peer       # against another checkout

A busy loop is a process that computes without end and may use every core. Prints a row per number of threads and of
loops: for each engine the median tokens per second and, in brackets, their share of its rate in the first row.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import compare
from revisions import ROOT, Worker

SETTLE_S = 0.5
"""Seconds in which the system spreads new busy loops over the cores."""


class PeerWorker:
    """llama.cpp, with the interface of a checkout's process."""

    def __init__(self, file: str, threads: int, n_ctx: int):
        self._peer = compare.Peer(file, threads, n_ctx, 1, repack=False)  # repacked Q8_0 crashes on some CPUs

    def run(self, kind: str, n: int) -> float:
        """Tokens per second of generating n tokens."""
        tokens = [(7 * i + 3) % self._peer.n_vocab for i in range(n)]
        self._peer.start(0)
        self._peer.evaluate(tokens[:8])
        started = time.perf_counter()
        for token in tokens:
            self._peer.evaluate([token])
        return n / (time.perf_counter() - started)

    def close(self) -> None:
        """Free its memory."""
        self._peer.close()


@contextmanager
def busy_loops(n: int) -> Iterator[None]:
    """Run n busy loops meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        if loops:
            time.sleep(SETTLE_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(workers: Sequence[Worker | PeerWorker], n: int, runs: int) -> list[float]:
    """Median tokens per second of each worker, which take turns."""
    rates = [[worker.run("generate", n) for worker in workers] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*rates, strict=True)]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("-n", type=int, default=64, help="tokens to generate; default: 64")
    parser.add_argument("-r", type=int, default=5, help="runs of each; default: 5")
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[2], help="numbers of threads; default: 2")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2], help="busy loops; default: 0 1 2")
    parser.add_argument("--other", type=Path, action="append", default=[], help="another checkout of llamacli")
    parser.add_argument("--no-peer", action="store_true", help="leave out llama.cpp")
    options = parser.parse_args()
    names = ["this", *(root.name for root in options.other), *([] if options.no_peer else ["llama.cpp"])]
    print(f"{'threads':>7} {'loops':>5} " + " ".join(f"{name:>18}" for name in names))
    for threads in options.threads:
        n_ctx = options.n + 16
        workers: list[Worker | PeerWorker] = [
            Worker(root, options.file, threads, n_ctx) for root in (ROOT, *options.other)
        ]
        if not options.no_peer:
            workers.append(PeerWorker(options.file, threads, n_ctx))
        measure(workers, options.n, 1)  # the first run is slower
        first: list[float] = []
        for n_loops in options.loops:
            with busy_loops(n_loops):
                rates = measure(workers, options.n, options.r)
            first = first or rates
            cells = (f"{rate:10.1f} ({rate / base:5.2f})" for rate, base in zip(rates, first, strict=True))
            print(f"{threads:>7} {n_loops:>5} " + " ".join(cells), flush=True)
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()

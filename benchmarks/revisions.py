#!/usr/bin/env python3
"""Compare the speed of two checkouts, alternating within one run.

    git worktree add /tmp/before HEAD~20
    python benchmarks/revisions.py /tmp/before FILE.gguf [FILE.gguf ...] -p 512 -n 32 [-r 9]

Each checkout runs in a process of its own, which loads the file once and waits while the other one works. Prints the
median tokens per second of both, and the median ratio of neighbouring runs with its interquartile range. `--start`
measures whole processes instead: seconds to the first word of the bundled demo model.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WORKER = """
import sys, time
import llamacli
path, threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = llamacli.load_model(path, threads=threads)
session = model.create_session(n_ctx=n_ctx, reuse=False)
n_vocab = model.config.n_vocab
print("ready", flush=True)
for line in sys.stdin:
    kind, n = line.split()
    n = int(n)
    tokens = [(7 * i + 3) % n_vocab for i in range(max(n, 8))]
    session.rewind(0)
    if kind == "generate":
        session.eval(tokens[:8])
    started = time.perf_counter()
    if kind == "prompt":
        session.eval(tokens[:n])
    else:
        for token in tokens[:n]:
            session.eval([token])
    print(n / (time.perf_counter() - started), flush=True)
"""


def environment(root: Path) -> dict[str, str]:
    """Environment in which Python imports the packages of a checkout."""
    paths = [root / "core", *sorted((root / "plugins").iterdir())]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


class Worker:
    """Process of a checkout with a loaded model."""

    def __init__(self, root: Path, file: str, threads: int, n_ctx: int):
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, file, str(threads), str(n_ctx)], env=environment(root), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._expect("ready")

    def run(self, kind: str, n: int) -> float:
        """Tokens per second of a prompt, or of generating, n tokens."""
        assert self._process.stdin
        self._process.stdin.write(f"{kind} {n}\n")
        self._process.stdin.flush()
        return float(self._expect())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _expect(self, line: str | None = None) -> str:
        assert self._process.stdout
        found = self._process.stdout.readline().strip()
        if not found or (line is not None and found != line):
            raise SystemExit(f"a worker ended or printed {found!r}")
        return found


def seconds_to_first_word(root: Path) -> float:
    """Measure seconds from process start to the demo model's first output."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacli", "run", "-n", "8"], env=environment(root), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout
    if not process.stdout.read(1):
        raise SystemExit(f"the demo of {root} printed nothing")
    seconds = time.perf_counter() - started
    process.communicate()
    return seconds


def report(name: str, before: list[float], after: list[float]) -> None:
    """Print a row: medians of both, and the ratio of neighbouring runs."""
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    print(
        f"{name:40} {statistics.median(before):10.2f} {statistics.median(after):10.2f} "
        f"{statistics.median(ratios):8.3f}  ({low:.3f} to {high:.3f})",
        flush=True,
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("files", nargs="*")
    parser.add_argument("-p", type=int, default=512, help="tokens of a prompt; default: 512")
    parser.add_argument("-n", type=int, default=32, help="tokens to generate; default: 32")
    parser.add_argument("-r", type=int, default=9, help="runs of each; default: 9")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--start", action="store_true", help="measure the start of processes too")
    options = parser.parse_args()
    print(f"{'':40} {'other':>10} {'this':>10} {'ratio':>8}  (interquartile range)")
    for file in options.files:
        workers = [Worker(root, file, options.threads, options.p + options.n + 8) for root in (options.other, ROOT)]
        for kind, n in (("prompt", options.p), ("generate", options.n)):
            runs = [[worker.run(kind, n) for worker in workers] for _ in range(options.r + 1)][1:]
            report(f"{Path(file).stem} {kind} {n}", *map(list, zip(*runs, strict=True)))
        for worker in workers:
            worker.close()
    if options.start:
        starts = [[seconds_to_first_word(root) for root in (options.other, ROOT)] for _ in range(options.r + 1)][1:]
        report("seconds to the demo's first word", *map(list, zip(*starts, strict=True)))


if __name__ == "__main__":
    main()

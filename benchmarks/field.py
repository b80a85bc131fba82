#!/usr/bin/env python3
"""Compare llamacli with other CPU engines and the memory's speed.

    python benchmarks/field.py FILE.gguf [FILE.gguf ...] --llama-bench BIN --ik-bench BIN --openvino PYTHON [-r 5]

The other engines are optional: llama.cpp's and ik_llama.cpp's `llama-bench`, and the interpreter of an environment with
`openvino-genai`. Each runs in a process of its own: llama.cpp with flash attention on and off, and the faster counts;
ik_llama.cpp with flash attention and weights repacked at load. Each repetition runs all, and reads the memory.

Prints a row per engine and test: median tokens per second, the median ratio of llamacli's speed to it in the same
repetition with its interquartile range, and for generation the share of the memory's speed: bytes of the weights that a
token needs, times tokens per second, divided by the speed of a plain read by all threads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
import numpy as np

from llamacli.util.memory import anonymous

OURS = "llamacli"
OPENVINO = Path(__file__).with_name("openvino_bench.py")
TIMEOUT_S = 900
MEMORY_BYTES = 1 << 30


def commands(options: argparse.Namespace, path: str) -> dict[str, list[str]]:
    """Command of each engine; all print llama-bench's JSON."""
    sizes = ["-p", str(options.n_prompt), "-n", str(options.n_gen), "-t", str(options.threads)]
    bench = ["-m", path, *sizes, "-r", "1", "-o", "json"]
    found = {OURS: [str(Path(sys.executable).with_name("llamacli")), "bench", *bench]}
    if options.llama_bench:
        found["llama.cpp"] = [options.llama_bench, *bench, "-fa", "0,1"]
    if options.ik_bench:
        found["ik_llama.cpp"] = [options.ik_bench, *bench, "-fa", "1", "-rtr", "1"]
    if options.openvino:
        found["OpenVINO GenAI"] = [options.openvino, str(OPENVINO), path, *sizes]
    return found


def speeds(command: Sequence[str]) -> dict[str, float]:
    """Tokens per second of an engine: test -> best of its settings."""
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    if answer.returncode:
        raise SystemExit(f"{command[0]} ended with status {answer.returncode}:\n{answer.stderr[-2000:]}")
    best: dict[str, float] = {}
    for run in json.loads(answer.stdout):
        test = f"pp{run['n_prompt']}" if run["n_prompt"] else f"tg{run['n_gen']}"
        best[test] = max(best.get(test, 0.0), run["avg_ts"])
    return best


STREAMS, RUN = 16, 64
"""Places that a thread reads from in turn, and words at each: a lone stream waits for the memory's latency."""


@numba.njit("int64(int64[:, ::1])", nogil=True)
def sum_of(words: np.ndarray) -> int:
    """Sum of integers, of several streams at once."""
    total = 0
    for start in range(0, words.shape[1], RUN):
        for stream in range(words.shape[0]):
            for word in words[stream, start : start + RUN]:
                total += word
    return total


def memory_speed(threads: int) -> float:
    """Bytes per second of a plain read by all threads.

    Of huge pages, in which llamacli keeps weights: with small ones a read waits for address translation.
    """
    words = anonymous(MEMORY_BYTES // (8 * STREAMS * threads) * 8 * STREAMS * threads).view(np.int64)
    words.fill(1)
    parts = words.reshape(threads, STREAMS, -1)

    def read() -> float:
        workers = [threading.Thread(target=sum_of, args=(part,)) for part in parts]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return words.nbytes / (time.perf_counter() - started)

    return max(read() for _ in range(5))


def bytes_per_token(path: str) -> float:
    """Bytes of the weights that a token uses."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        return int(field.contents()) if field else 1

    share = number("expert_used_count") / number("expert_count")
    names = {tensor.name for tensor in reader.tensors}
    tied = "output.weight" not in names
    return sum(
        int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1.0)
        for tensor in reader.tensors
        if tied or tensor.name != "token_embd.weight"
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def rows(path: str, options: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Measure a file and report the rows of its table."""
    runs = commands(options, path)
    found: dict[tuple[str, str], list[float]] = {}
    memory: list[float] = []
    for repetition in range(options.repetitions + 1):  # the first warms up caches of files and of kernels
        memory.append(memory_speed(options.threads))
        for name, command in runs.items():
            for test, speed in speeds(command).items():
                if repetition:
                    found.setdefault((name, test), []).append(speed)
    read, needed = statistics.median(memory), bytes_per_token(path)
    for (name, test), values in found.items():
        low, ratio, high = quartiles([ours / other for ours, other in zip(found[OURS, test], values, strict=True)])
        speed = statistics.median(values)
        share = f"{needed * speed / read:.2f}" if test.startswith("tg") else ""
        compared = "" if name == OURS else f"{ratio:.2f} | {low:.2f} to {high:.2f}"
        report(f"| {Path(path).stem} | {test} | {name} | {speed:.1f} | {compared or ' | '} | {share} |")
    report(f"| {Path(path).stem} | memory read | | {read / 1e9:.1f} GB/s | | | |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--llama-bench", metavar="BIN", help="llama.cpp's llama-bench")
    parser.add_argument("--ik-bench", metavar="BIN", help="ik_llama.cpp's llama-bench")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter that has openvino-genai")
    options = parser.parse_args()
    print("| model | test | engine | t/s | llamacli's ratio | middle half | share of memory speed |")
    print("|---|---|---|---|---|---|---|")
    for path in options.files:
        rows(path, options, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()

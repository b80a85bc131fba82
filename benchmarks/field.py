#!/usr/bin/env python3
"""Compare llamacli with other CPU engines and the memory's speed.

    python benchmarks/field.py FILE.gguf [FILE.gguf ...] --llama-bench BIN --ik-bench BIN --openvino PYTHON [-r 5]

The other engines are optional: llama.cpp's and ik_llama.cpp's `llama-bench`, and the interpreter of an environment with
`openvino-genai`. Each runs in a process of its own: llama.cpp with flash attention on and off, and the faster counts;
ik_llama.cpp with flash attention and weights repacked at load. Each repetition runs all, and reads the memory.

Prints a row per engine and test: median tokens per second, the median ratio of llamacli's speed to it in the same
repetition with its interquartile range, and for generation the share of the memory's speed: bytes of the weights that a
token needs, as they are in the file, times tokens per second, divided by the speed of a plain read by all threads just
before. An engine that cannot run the file has "-" and what it said.
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

import numpy as np

from llamacli.util.memory import anonymous

OURS = "llamacli"
OPENVINO = Path(__file__).with_name("openvino_bench.py")
TIMEOUT_S = 900
READ_BYTES = 1 << 30
"""Bytes of a read at least, so that the start of threads does not count."""


class RefusedError(Exception):
    """An engine cannot run a file."""


def commands(options: argparse.Namespace, path: str, n_prompt: int, n_gen: int) -> dict[str, list[str]]:
    """Command of each engine; all print llama-bench's JSON."""
    sizes = ["-p", str(n_prompt), "-n", str(n_gen), "-t", str(options.threads)]
    bench = ["-m", path, *sizes, "-r", "1", "-o", "json"]
    found = {OURS: [str(Path(sys.executable).with_name("llamacli")), "bench", *bench]}
    if options.tiles and n_prompt:
        found["llamacli, tiles"] = [*found[OURS], "--prompts", "tiles"]
    if options.llama_bench:
        found["llama.cpp"] = [options.llama_bench, *bench, "-fa", "0,1"]
    if options.ik_bench:
        found["ik_llama.cpp"] = [options.ik_bench, *bench, "-fa", "1", "-rtr", "1"]
    if options.openvino:
        found["OpenVINO GenAI"] = [options.openvino, str(OPENVINO), path, *sizes]
    return found


def speeds(command: Sequence[str]) -> dict[str, float]:
    """Tokens per second of an engine: test -> best of its settings."""
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RefusedError(f"no result in {TIMEOUT_S} s") from None
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise RefusedError(lines[-1].strip() if lines else f"ended with status {answer.returncode}")
    best: dict[str, float] = {}
    for run in json.loads(answer.stdout):
        test = f"pp{run['n_prompt']}" if run["n_prompt"] else f"tg{run['n_gen']}"
        best[test] = max(best.get(test, 0.0), run["avg_ts"])
    return best


def memory_speed(n_bytes: int, threads: int) -> float:
    """Bytes per second of repeated reads of `n_bytes` by all threads.

    In huge pages, in which llamacli keeps weights: with small ones a read waits for address translation. As many bytes
    as the weights have, since caches keep as much of either. NumPy's maximum of bytes is as fast as loads alone.
    """
    data = anonymous(n_bytes // threads * threads)
    data.fill(1)
    parts, rounds = data.reshape(threads, -1), -(-READ_BYTES // n_bytes)

    def read(part: np.ndarray) -> None:
        for _ in range(rounds):
            part.max()

    def seconds() -> float:
        workers = [threading.Thread(target=read, args=(part,)) for part in parts]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started

    return rounds * data.nbytes / min(seconds() for _ in range(5))


def weight_bytes(path: str) -> tuple[float, int]:
    """Bytes of weights that a token uses, and that all use."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        return int(field.contents()) if field else 1

    share = number("expert_used_count") / number("expert_count")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    used = {t.name: int(t.n_bytes) for t in reader.tensors if tied or t.name != "token_embd.weight"}
    return sum(size * (share if "_exps." in name else 1.0) for name, size in used.items()), sum(used.values())


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def rows(path: str, options: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Measure a file and report the rows of its table."""
    model, (needed, total) = Path(path).stem, weight_bytes(path)
    runs = commands(options, path, options.n_prompt, options.n_gen)
    for name, command in commands(options, path, min(options.n_prompt, 32), 2).items():
        try:
            speeds(command)  # warms up caches of files and of kernels
        except RefusedError as error:
            if name == OURS:
                raise
            del runs[name]
            report(f"| {model} | | {name} | - | | {error} | |")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    memory: list[float] = []
    for _ in range(options.repetitions):
        for name, command in runs.items():
            memory.append(memory_speed(total, options.threads))
            for test, speed in speeds(command).items():
                found.setdefault((name, test), []).append((speed, needed * speed / memory[-1]))
    for (name, test), values in found.items():
        speed, share = (statistics.median(column) for column in zip(*values, strict=True))
        ratios = [ours[0] / other[0] for ours, other in zip(found[OURS, test], values, strict=True)]
        low, ratio, high = quartiles(ratios)
        compared = " | " if name == OURS else f"{ratio:.2f} | {low:.2f} to {high:.2f}"
        report(f"| {model} | {test} | {name} | {speed:.1f} | {compared} | {f'{share:.2f}' if 'tg' in test else ''} |")
    low, middle, high = (speed / 1e9 for speed in quartiles(memory))
    report(f"| {model} | read of {total / 1e6:.0f} MB | memory | {middle:.1f} GB/s | | {low:.1f} to {high:.1f} | |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tiles", action="store_true", help="run llamacli with `--prompts tiles` too")
    parser.add_argument("--llama-bench", metavar="BIN", help="llama.cpp's llama-bench")
    parser.add_argument("--ik-bench", metavar="BIN", help="ik_llama.cpp's llama-bench")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter that has openvino-genai")
    options = parser.parse_args()
    print("| model | test | engine | t/s | llamacli's ratio | middle half | share of memory speed |")
    print("|---|---|---|---|---|---|---|")
    for path in options.files:
        try:
            rows(path, options, lambda line: print(line, flush=True))
        except RefusedError as error:
            print(f"| {Path(path).stem} | | | - | | {error} | |", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compare starts with llama.cpp: time to the first token, peak memory.

    python benchmarks/starts.py FILE.gguf [FILE.gguf ...] --peer llama-simple [--first]

The file needs a vocabulary (`make_model.py --vocabulary`). llama-simple is an example of llama.cpp (`examples/simple`).
Both programs run in turns as new processes, after a run of each that fills the caches: kernels, packed copy and
bytecode (so not with PYTHONDONTWRITEBYTECODE). Printed are medians in seconds to the last output, which is the first
token's, and to the end of the process, the peak memory in MiB, and the median ratio of neighbouring outputs. With
`--first` each run of llamacli has empty caches, but bytecode: kernels come from llamacli-kernels, if its packs are
installed, or are compiled.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROMPT = "Once upon a time"


class Run(NamedTuple):
    """Seconds to the last output and to the end, and peak MiB."""

    output: float
    end: float
    peak: float


def measure(command: list[str], *, first: bool = False) -> Run:
    """Run a command once; the first time has empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(command, os.environ | ({"LLAMACLI_CACHE": folder} if first else {}))


def _measure(command: list[str], environment: dict[str, str]) -> Run:
    started = time.perf_counter()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process, output = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null, env=environment), 0.0
    assert process.stdout
    while data := os.read(process.stdout.fileno(), 1 << 16):
        if data.strip():
            output = time.perf_counter() - started
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return Run(output, time.perf_counter() - started, usage.ru_maxrss / 1024)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--peer", help="llama.cpp's llama-simple")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=9)
    parser.add_argument("--first", action="store_true", help="with empty caches")
    options = parser.parse_args()
    for file in options.files:
        ours = [str(Path(sys.executable).with_name("llamacli")), "run", "-m", file, "-p", PROMPT, "-n", "1", "--raw"]
        commands = {"llamacli": [*ours, "-t", str(options.threads)]}
        if options.peer:
            commands["llama.cpp"] = [options.peer, "-m", file, "-n", "1", PROMPT]
        for command in commands.values():
            measure(command)
        turns = [
            {name: measure(command, first=options.first) for name, command in commands.items()}
            for _ in range(options.repetitions)
        ]
        print(f"{file}: {Path(file).stat().st_size / 2**20:.0f} MiB")
        for name in commands:
            runs = [turn[name] for turn in turns]
            output, end = (statistics.median(run[i] for run in runs) for i in (0, 1))
            ratio = statistics.median(turn["llamacli"].output / turn[name].output for turn in turns)
            peak = max(run.peak for run in runs)
            print(f"  {name:10} output {output:.2f} s, end {end:.2f} s, peak {peak:.0f} MiB, ours to this {ratio:.2f}")


if __name__ == "__main__":
    main()

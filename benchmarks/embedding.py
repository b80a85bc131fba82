#!/usr/bin/env python3
"""Compare the embedding of many short texts with ONNX Runtime.

    python -m venv onnx && onnx/bin/pip install torch transformers onnx onnxruntime onnxscript
    onnx/bin/python benchmarks/onnx_bench.py bge --make          # a folder of bge-small's shape, and its ONNX file
    llamacli convert bge bge-small.gguf Q8_0
    python benchmarks/embedding.py bge-small.gguf --onnx onnx/bin/python bge/int8.onnx

200 texts of 20 to 160 random tokens, mean pooling, two threads. ONNX Runtime takes the file with integers of 8 bits in
batches of `--batch` texts of about the same length, padded to the longest. Both engines run in turns; printed are the
medians of the seconds of all texts, and of the ratio.
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from llamacli import load_embedder

PEER = Path(__file__).with_name("onnx_bench.py")


def texts(n: int) -> list[list[int]]:
    """Random ids of texts."""
    random = np.random.default_rng(0)
    return [random.integers(1000, 20000, length).tolist() for length in random.integers(20, 161, n)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--onnx", nargs=2, metavar=("PYTHON", "FILE"))
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    options = parser.parse_args()
    given, ours, theirs = texts(options.texts), [], []
    with load_embedder(options.model, threads=options.threads) as embedder:
        list(embedder.vectors(given))
        for _ in range(options.repetitions):
            started = time.perf_counter()
            list(embedder.vectors(given))
            ours.append(time.perf_counter() - started)
            if options.onnx:
                python, file = options.onnx
                sizes = ["--batch", str(options.batch), "-t", str(options.threads)]
                command = [python, str(PEER), file, *sizes]
                answer = subprocess.run(command, check=True, input=json.dumps(given), capture_output=True, text=True)
                theirs.append(float(answer.stdout))
    print(f"llamacli: {statistics.median(ours):.3f} s, {sum(map(len, given)) / statistics.median(ours):.0f} tokens/s")
    if theirs:
        ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)]
        print(f"ONNX Runtime: {statistics.median(theirs):.3f} s, ratio {statistics.median(ratios):.2f}", end=" ")
        print(f"({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Benchmark OpenVINO GenAI on a GGUF file; print llama-bench's JSON.

    pip install openvino-genai
    python benchmarks/openvino_bench.py FILE.gguf -p 512 -n 32 -t 2

Each prompt is another one, because the pipeline caches prefixes.
"""

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino_genai as genai

N_START = 8
"""Tokens of the prompt before generation."""


def results(path: str, n_prompt: int, n_gen: int, threads: int) -> Iterator[dict[str, float]]:
    """Tokens per second of a prompt and of generation."""
    pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
    random = np.random.default_rng()

    def seconds(n: int, n_new: int) -> float:
        tokens = ov.Tensor(random.integers(100, 30000, (1, n), dtype=np.int64))
        config = genai.GenerationConfig(max_new_tokens=n_new, ignore_eos=True, do_sample=False)
        started = time.perf_counter()
        pipeline.generate(tokens, config)
        return time.perf_counter() - started

    seconds(n_prompt or N_START, 2)
    if n_prompt:
        yield {"n_prompt": n_prompt, "n_gen": 0, "avg_ts": n_prompt / seconds(n_prompt, 1)}
    if n_gen:
        first = seconds(N_START, 1)
        yield {"n_prompt": 0, "n_gen": n_gen, "avg_ts": n_gen / (seconds(N_START, n_gen + 1) - first)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(list(results(options.file, options.n_prompt, options.n_gen, options.threads))))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure the time per token of sampler chains on random logits.

    python benchmarks/sampling.py [-n 262144] [-r 200]

Prints a row per chain: median and 95th percentile of microseconds per token, on one thread.
"""

import argparse
import time

import numpy as np

from llamacli import SamplingParams
from llamacli.sampling import SamplerState

AS_LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
CHAINS = {
    "greedy": SamplingParams(),
    "greedy, 5 log-probabilities": SamplingParams(n_probs=5),
    "defaults of the command line": SamplingParams(**DEFAULTS, samplers=AS_LLAMA_CPP),
    "  with penalties": SamplingParams(**DEFAULTS, repeat_penalty=1.1, frequency_penalty=0.1, samplers=AS_LLAMA_CPP),
    "  with temperature first": SamplingParams(**DEFAULTS, repeat_penalty=1.1, frequency_penalty=0.1),
    "  with DRY over 4096 tokens": SamplingParams(**DEFAULTS, dry_multiplier=0.8, dry_penalty_last_n=4096),
    "temperature only": SamplingParams(temperature=0.8),
    "top-p only": SamplingParams(temperature=0.8, top_p=0.95),
    "min-p only": SamplingParams(temperature=0.8, min_p=0.05),
    "top-n-sigma only": SamplingParams(temperature=0.8, top_n_sigma=1.0),
    "typical-p only": SamplingParams(temperature=0.8, typical_p=0.95),
    "mirostat": SamplingParams(temperature=0.8, mirostat=1),
    "mirostat 2": SamplingParams(temperature=0.8, mirostat=2),
    "min-p, adaptive-p": SamplingParams(temperature=0.8, min_p=0.01, adaptive_target=0.5),
}


def microseconds(params: SamplingParams, logits: np.ndarray, repetitions: int) -> np.ndarray:
    """Measure the microseconds of each repetition, after 10 to warm up."""
    state, times = SamplerState(1), []
    for _ in range(repetitions + 10):
        fresh = logits.copy()
        started = time.perf_counter()
        state.accept(state.sample(fresh, params))
        times.append(time.perf_counter() - started)
    return np.array(times[10:]) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--vocabulary", type=int, default=262144, help="tokens")
    parser.add_argument("-r", "--repetitions", type=int, default=200)
    arguments = parser.parse_args()
    logits = np.random.default_rng(0).normal(0, 3, arguments.vocabulary).astype(np.float32)
    print(f"{'chain':30} {'median us':>10} {'95 % us':>10}")
    for name, params in CHAINS.items():
        times = microseconds(params, logits, arguments.repetitions)
        print(f"{name:30} {np.median(times):10.0f} {np.percentile(times, 95):10.0f}")


if __name__ == "__main__":
    main()

"""Sampler test cases of llama.cpp (tests/test-sampling.cpp, llama-cpp-python 0.3.36).

Probabilities before, parameters, probabilities after, with llama.cpp's tolerance of 1e-5.
"""

import math

import numpy as np
import pytest

from candidates import apply, distribution
from llamacli.sampling import (
    Dry,
    DynamicTemperature,
    MinP,
    Penalties,
    Sampler,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
)

TENTHS = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]
FIFTHS = [0.2] * 5

CASES = [
    (TENTHS, Temperature(1.0), TENTHS),
    (TENTHS, Temperature(0.0), [0, 0, 0, 1]),
    (TENTHS, DynamicTemperature(1.0, 0.0, 1.0), TENTHS),
    (TENTHS, DynamicTemperature(0.0, 0.0, 1.0), [0, 0, 0, 1]),
    (TENTHS, TopK(1), [0, 0, 0, 1]),
    (TENTHS, TopK(3), [0, 0.22222, 0.33333, 0.44444]),
    (TENTHS, TopK(4), TENTHS),
    (TENTHS, TopK(0), TENTHS),
    (TENTHS, TopP(0), [0, 0, 0, 1]),
    (TENTHS, TopP(0.7), [0, 0, 0.428571, 0.571429]),
    (TENTHS, TopP(0.8), [0, 0.22222, 0.33333, 0.44444]),
    (TENTHS, TopP(1.0), TENTHS),
    (TENTHS, MinP(0.00), TENTHS),
    (TENTHS, MinP(0.24), TENTHS),
    (TENTHS, MinP(0.26), [0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    (TENTHS, MinP(0.49), [0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]),
    (TENTHS, MinP(0.51), [0, 0, 0.3 / 0.7, 0.4 / 0.7]),
    (TENTHS, MinP(0.74), [0, 0, 0.3 / 0.7, 0.4 / 0.7]),
    (TENTHS, MinP(0.76), [0, 0, 0, 1]),
    (TENTHS, MinP(1.00), [0, 0, 0, 1]),
    (TENTHS, MinP(1.05), [0, 0, 0, 1]),
    (FALLING, Xtc(0.99, 0.09), [0, 0, 0, 1]),
    (FALLING, Xtc(0.99, 0.19), [0, 0, 0.2 / 0.3, 0.1 / 0.3]),
    (FALLING, Xtc(0.99, 0.29), [0, 0.3 / 0.6, 0.2 / 0.6, 0.1 / 0.6]),
    (FALLING, Xtc(0.99, 0.39), FALLING),
    ([0.5, 0.5], Xtc(0.99, 0.5), [0, 1]),
    ([0.97, 0.01, 0.01, 0.01], TypicalP(0.5), [1, 0, 0, 0]),
    ([0.4, 0.2, 0.2, 0.2], TypicalP(0.5), [0, 1 / 3, 1 / 3, 1 / 3]),
    (TENTHS, TopNSigma(1.0), [0, 0, 0.428571, 0.571429]),
    (TENTHS, TopNSigma(0.0), TENTHS),
    (TENTHS, TopNSigma(3.0), TENTHS),
]

AFTER = [
    (FIFTHS, [0], Penalties(1, 50), [0, 0.25, 0.25, 0.25, 0.25]),
    (FIFTHS, [0, 1, 2], Penalties(3, 50), [0, 0, 0, 0.5, 0.5]),
    (FIFTHS, [0, 1, 2, 0, 0], Penalties(5, 50), [0, 0, 0, 0.5, 0.5]),
    (FIFTHS, [0], Penalties(1, 1, 5, 5), [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
    (FIFTHS, [0, 1, 2], Penalties(3, 1, 5, 5), [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
    (FIFTHS, [0, 1, 2, 0, 0], Penalties(5, 1, 5, 5), [0, 0.000023, 0.000023, 0.499977, 0.499977]),
    ([0.25] * 4, [0, 1], Dry(1, 1.1, 2, 4), [0.25] * 4),
    ([0.25] * 4, [0, 1, 2, 0, 1], Dry(1, 1.1, 2, 5), [0.296923, 0.296923, 0.109232, 0.296923]),
    (FIFTHS, [0, 1, 3, 4, 0, 1], Dry(1, 1.1, 2, 6, {3: ((),)}), FIFTHS),
    (FIFTHS, [0, 1, 2, 0, 1], Dry(2, 1.1, 2, 5), [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
    (FIFTHS, [0, 1, 2, 3, 4, 0, 1], Dry(1, 1.1, 4, 7), FIFTHS),
]


def check(before: list[float], sampler: Sampler, after: list[float], history: list[int]) -> None:
    left = distribution(apply(np.log(np.array(before, np.float32)), sampler, history=history, seed=0))
    assert [left.get(i, 0.0) for i in range(len(before))] == pytest.approx(after, abs=1e-5, rel=0)


@pytest.mark.parametrize(("before", "sampler", "after"), CASES, ids=lambda value: repr(value))
def test_distribution(before: list[float], sampler: Sampler, after: list[float]) -> None:
    check(before, sampler, after, [])


@pytest.mark.parametrize(("before", "history", "sampler", "after"), AFTER, ids=lambda value: repr(value))
def test_distribution_after_tokens(
    before: list[float], history: list[int], sampler: Sampler, after: list[float]
) -> None:
    check(before, sampler, after, history)


N = 10000
QUEUES = [
    ("k", 10000, 1.0, 1.0),
    ("k", 1, 1.0, 1.0),
    ("p", 10000, 1.0, 1.0),
    ("p", 10000, 0.0, 1.0),
    ("m", 10000, 1.0, 1.0),
    ("m", 10000, 1.0, 1e-12),
    ("k", 100, 1.0, 1.0),
    ("p", 10000, 0.0003, 1.0),
    ("p", 10000, 0.8, 1.0),
    ("m", 10000, 1.0, 9997.9 / 9999),
    ("m", 10000, 1.0, 0.1),
    *(
        (queue, 100, 0.8, 0.1)
        for queue in ("kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp", "mpk")
    ),
    ("mp", 100, 0.8, 9997.9 / 9999),
]
"""Samplers one after the other on 10000 tokens whose probabilities are as their ids."""


def least_kept(queue: str, top_k: int, top_p: float, min_p: float) -> int:
    """Smallest id kept, by definition in integers; later ids are kept too."""
    least = 0
    for name in queue:
        if name == "k":
            least = max(least, N - top_k)
        elif name == "p" and top_p < 1:
            wanted = math.ceil(np.float32(top_p) * np.float32(sum(range(least, N))))
            total, least = 0, N
            while total < wanted or least == N:
                least -= 1
                total += least
        elif name == "m" and min_p > 0:
            least = max(least, min(math.ceil(np.float32(min_p) * np.float32(N - 1)), N - 1))
    return least


@pytest.mark.parametrize(("queue", "top_k", "top_p", "min_p"), QUEUES)
def test_queue(queue: str, top_k: int, top_p: float, min_p: float) -> None:
    kinds = {"k": TopK(top_k), "p": TopP(top_p), "m": MinP(min_p)}
    with np.errstate(divide="ignore"):
        logits = np.log(np.arange(N, dtype=np.float32))
    left = apply(logits, *(kinds[name] for name in queue))
    assert left.ids.tolist() == list(range(least_kept(queue, top_k, top_p, min_p), N))

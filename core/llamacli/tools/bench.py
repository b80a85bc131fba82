"""Speed benchmark with the tests and column names of llama.cpp's."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from llamacli.engine.compiled_model import KVTypes
from llamacli.kv import KVType
from llamacli.loaders import open_model_file
from llamacli.model import Model
from llamacli.plugins import installed_plugins


@attrs.frozen
class Row:
    """Tokens per second of one test: mean, standard deviation and samples.

    A test evaluates `n_prompt` tokens at once, or `n_gen` one by one, after `n_depth` cached tokens.
    """

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    backend: str
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]

    @property
    def test(self) -> str:
        """Name of the test: pp512, tg128, tg128 @ d4096."""
        return _name(self.n_prompt, self.n_gen, self.n_depth)

    def as_dict(self) -> dict[str, Any]:
        """The fields as a dict, for JSON and CSV."""
        return attrs.asdict(self)


def measure(
    path: str,
    model: Model,
    prompts: Sequence[int],
    generations: Sequence[int],
    depths: Sequence[int],
    *,
    repetitions: int,
    threads: int,
    kv_type: KVTypes,
    progress: Callable[[str, int, int], None] = lambda test, done, total: None,
) -> Iterator[Row]:
    """Run a test for every prompt and generation length at every depth.

    A length of 0 means no test.

    `model` was loaded from `path` with `threads` threads. Each test runs once to warm up, then `repetitions` times.
    `progress` is called between runs with the test's name, the runs done and those in all.
    """
    about = _describe(path)
    for depth in depths:
        for n_prompt, n_gen in [*((n, 0) for n in prompts if n), *((0, n) for n in generations if n)]:
            started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            name, samples = _name(n_prompt, n_gen, depth), list[int]()
            progress(name, 0, repetitions + 1)
            for ns in _samples(model, n_prompt, n_gen, depth, repetitions, kv_type):
                samples.append(ns)
                progress(name, len(samples), repetitions + 1)
            del samples[0]
            n = n_prompt + n_gen
            rates = [n * 1e9 / ns for ns in samples]
            yield Row(
                *about, backend="CPU", n_threads=threads, type_k=KVType.of(kv_type).k, type_v=KVType.of(kv_type).v,
                n_prompt=n_prompt, n_gen=n_gen, n_depth=depth, test_time=started, avg_ns=statistics.mean(samples),
                stddev_ns=_spread(samples), avg_ts=statistics.mean(rates), stddev_ts=_spread(rates),
                samples_ns=samples, samples_ts=rates,
            )  # fmt: skip


def _name(n_prompt: int, n_gen: int, n_depth: int) -> str:
    name = f"pp{n_prompt}" if n_prompt else f"tg{n_gen}"
    return f"{name} @ d{n_depth}" if n_depth else name


def _describe(path: str) -> tuple[str, str, int, int]:
    file = open_model_file(path, installed_plugins().loaders())
    try:
        weights: Counter[str] = Counter()
        for info in file.tensors.values():
            weights[info.type.name] += info.n_bytes
        params = sum(int(np.prod(info.shape, dtype=object)) for info in file.tensors.values())
        kind = weights.most_common(1)[0][0] if weights else "none"
        architecture = file.metadata.get("general.architecture", "unknown")
        return Path(path).name, f"{architecture} {kind}", weights.total(), params
    finally:
        file.close()


def _samples(model: Model, n_prompt: int, n_gen: int, depth: int, repetitions: int, kv_type: KVTypes) -> Iterator[int]:
    """Measure the nanoseconds of each run; the first one warms up."""
    tokens = np.random.default_rng(0).integers(0, model.config.n_vocab, max(n_prompt, n_gen, depth)).tolist()
    with model.create_session(n_ctx=depth + n_prompt + n_gen, kv_type=kv_type, reuse=False) as session:
        session.eval(tokens[:depth])
        for _ in range(repetitions + 1):
            session.rewind(depth)
            if len(session.cache.tokens) < depth:  # a sliding window has evicted some of them
                session.rewind(0)
                session.eval(tokens[:depth])
            started = time.perf_counter_ns()
            if n_prompt:
                session.eval(tokens[:n_prompt])
            for i in range(n_gen):
                session.eval(tokens[i : i + 1], generated=True)
            yield time.perf_counter_ns() - started


def _spread(samples: Sequence[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0

#!/usr/bin/env python3
"""Measure a stream beside a batch: its gaps, and the batch's share.

    python benchmarks/background.py FILE.gguf [-t N] [--turns 5] [--tokens 64] [--json OUT.json]

In each turn a text is generated alone, then a batch of background requests runs alone for as many tokens, then both run
at once. Prints the median over the turns of

- gaps: the mean gap between tokens of the stream beside the batch, in units of that without it (at most 1.15);
- batch: tokens of the batch in a second beside the stream, in units of 0.13 of those of the batch alone, which is the
  time that background requests may add to a step (at least 0.8).

Other programs on the machine falsify both; turns are short so that they meet all three runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from streams import timed

from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.planning import BACKGROUND_SHARE
from llamacli.serve.settings import EngineSettings

N_BATCH, N_PROMPT = 8, 16


def prompt_of(name: str) -> list[int]:
    """Prompt of a request, which no other has."""
    return [100 + (hash(name) + i) % 5000 for i in range(N_PROMPT)]


async def gaps_of(engine: LocalEngine, name: str, n_tokens: int) -> float:
    """Mean gap between the texts of a stream, in seconds."""
    times, _ = await timed(engine, name, prompt_of(name), n_tokens)
    return (times[-1][0] - times[0][0]) / (n_tokens - 1)


class Batch:
    """Background requests, one after another in each of some slots."""

    def __init__(self, engine: LocalEngine, name: str, n_tokens: int):
        self._engine, self._name, self._n_tokens = engine, name, n_tokens
        self._tasks = [asyncio.create_task(self._run(slot)) for slot in range(N_BATCH)]

    async def _run(self, slot: int) -> None:
        for number in range(1_000_000):
            name = f"{self._name} {slot} {number}"
            await timed(self._engine, name, prompt_of(name), self._n_tokens, background=True)

    async def end(self) -> None:
        """Cancel what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def generated(engine: LocalEngine) -> int:
    """Tokens that the engine has generated."""
    return engine.stats().models["model"].generation_tokens


async def measure(path: Path, threads: int | None, turns: int, n_tokens: int) -> dict[str, list[float]]:
    """Ratios of each turn."""
    engine = LocalEngine(
        [ModelSource("model", path)], EngineSettings(threads=threads, n_ctx=1024, max_running=N_BATCH + 1)
    )
    found: dict[str, list[float]] = {"gaps": [], "batch": []}
    try:
        (await engine.pin("model")).release()
        await gaps_of(engine, "warm", n_tokens)
        for turn in range(turns):
            alone = await gaps_of(engine, f"alone {turn}", n_tokens)
            batch = Batch(engine, f"batch {turn}", n_tokens)
            await asyncio.sleep(10 * alone)
            begun, before = time.perf_counter(), generated(engine)
            await asyncio.sleep(n_tokens * alone)
            rate = (generated(engine) - before) / (time.perf_counter() - begun)
            begun, before = time.perf_counter(), generated(engine)
            beside = await gaps_of(engine, f"beside {turn}", n_tokens)
            more = (generated(engine) - before - n_tokens) / (time.perf_counter() - begun)
            await batch.end()
            found["gaps"].append(beside / alone)
            found["batch"].append(more / (BACKGROUND_SHARE * rate))
    finally:
        engine.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measure(given.file, given.threads, given.turns, given.tokens))
    for name, values in found.items():
        print(f"{name}: {statistics.median(values):.2f}   ({', '.join(f'{value:.2f}' for value in values)})")
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure a prompt after a restart against a cold one.

    python benchmarks/prompt_cache.py FILE.gguf [-t N] [--tokens 2000] [--turns 3] [--json OUT.json]

Each turn loads the model with an empty `--prompt-cache`, evaluates a prompt, and unloads; then it loads the model again
and evaluates the prompt again. Prints the times to the first token, by the clock and of processor time, and
the median ratio of the second to the first (at most 0.05). Ends with status 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from streams import timed

from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings


async def first_token(path: Path, settings: EngineSettings, prompt: tuple[int, ...]) -> tuple[float, float, str]:
    """Time to the first text, processor time in it, and the text."""
    engine = LocalEngine([ModelSource("model", path)], settings)
    try:
        (await engine.pin("model")).release()
        times, text = await timed(engine, "a", prompt, 16, temperature=0.0)
        return (*times[0], text)
    finally:
        await asyncio.to_thread(engine.close)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ratios: list[tuple[float, float]] = []
    for turn in range(given.turns):
        prompt = tuple(100 + (turn * 7919 + i * 31) % 5000 for i in range(given.tokens))
        with tempfile.TemporaryDirectory() as folder:
            settings = EngineSettings(
                threads=given.threads, n_ctx=given.tokens + 48, prompt_cache=(f"{folder}/prompts", 4 << 30)
            )
            cold = asyncio.run(first_token(given.file, settings, prompt))
            warm = asyncio.run(first_token(given.file, settings, prompt))
        if cold[2] != warm[2]:
            sys.exit("the texts differ")
        ratios.append((warm[0] / cold[0], warm[1] / cold[1]))
        print(f"cold {cold[0]:.3f} s ({cold[1]:.3f} of processors), after a restart {warm[0]:.3f} s ({warm[1]:.3f})")
    clock, processor = map(statistics.median, zip(*ratios, strict=True))
    print(f"ratio: {clock:.3f} by the clock, {processor:.3f} of processor time; texts are equal")
    if given.json:
        given.json.write_text(json.dumps(ratios))


if __name__ == "__main__":
    main()

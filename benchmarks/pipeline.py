#!/usr/bin/env python3
"""Measure a model that is divided among two processes.

    python benchmarks/pipeline.py FILE.gguf [--tokens 32] [--prompt 1024] [--turns 3] [--json OUT.json]

One process alone, with one thread, and this model divided in equal shares among a caller and a `llamacli worker` on the
loopback take turns. Prints memory (the peak of each, beside that of the process alone), tokens a second of generation,
which one text cannot have in several stages at once, and of a prompt, whose batches are in both stages: of the process
alone, divided, and in units of the bound (generation: as fast as alone; prompt: twice as fast, less the time in which
the pipeline fills). Then simulates links of 1 and 10 Gbit/s and 2 to 8 nodes from these times.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECRET = b"a secret of the benchmark"
N_BATCH = 512
"""Tokens of a batch of a prompt."""

LATENCY_S = 1e-4
"""Time of a message in a network of one building, one way."""


def measure(path: Path, n_prompt: int, n_tokens: int, address: str) -> dict[str, float]:
    """Speeds and peak of this process, alone or with a worker."""
    from llamacli import load_model
    from llamacli.stages.frames import address_of
    from llamacli.stages.link import StagedEngine
    from llamacli.util.system import peak_rss

    engine = StagedEngine([address_of(address)], SECRET, threads=1, split=[1, 1]) if address else None
    prompt = [100 + (i * 31) % 5000 for i in range(n_prompt)]
    with (
        load_model(path, threads=1, engine=engine) as model,
        model.create_session(n_ctx=n_prompt + n_tokens + 8, reuse=False) as session,
    ):
        session.eval(prompt[:16])
        session.rewind(0)
        started = time.perf_counter()
        session.eval(prompt)
        prompted = time.perf_counter()
        for token in prompt[:n_tokens]:
            session.eval([token])
        ended = time.perf_counter()
        width = model.config.n_embd
    return {
        "prompt": n_prompt / (prompted - started),
        "generation": n_tokens / (ended - prompted),
        "peak": float(peak_rss() or 0),
        "width": width,
    }


def run(path: Path, given: argparse.Namespace, *, divided: bool) -> dict[str, float]:
    """Measure in processes of their own."""
    worker, address = None, ""
    with tempfile.TemporaryDirectory() as folder:
        if divided:
            secret = Path(folder, "secret")
            secret.touch(0o600)
            secret.write_bytes(SECRET)
            command = [sys.executable, "-m", "llamacli", "worker", str(path), "--listen", "127.0.0.1:0", "-t", "1"]
            worker = subprocess.Popen([*command, "--secret-file", str(secret)], stderr=subprocess.PIPE, text=True)
            assert worker.stderr is not None
            while not (found := re.search(r"listening on (\S+)", worker.stderr.readline())):
                assert worker.poll() is None, "the worker has ended"
            address = found[1]
        try:
            command = [sys.executable, __file__, "--child", str(path), str(given.prompt), str(given.tokens), address]
            result: dict[str, float] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
            if worker is not None:
                status = Path(f"/proc/{worker.pid}/status").read_text()
                result["worker peak"] = 1024.0 * int(re.findall(r"VmHWM:\s*(\d+)", status)[0])
        finally:
            if worker is not None:
                worker.terminate()
                worker.communicate()
    return result


def simulated(alone: dict[str, float], n_nodes: int, bits: float, n_prompt: int) -> tuple[float, float]:
    """Tokens a second of generation and of a prompt.

    Nodes have equal shares of the layers. A message takes LATENCY_S and its bytes; a stage sends float32 rows of the
    model's width, while it computes the next batch.
    """
    row_s = 32.0 * alone["width"] / bits
    token_s = 1 / alone["generation"] + n_nodes * (LATENCY_S + row_s)  # back to the caller too
    n_batches = -(-n_prompt // N_BATCH)
    stage_s = max(N_BATCH / alone["prompt"] / n_nodes, N_BATCH * row_s)
    filled_s = (n_nodes - 1) * (N_BATCH / alone["prompt"] / n_nodes + N_BATCH * row_s + LATENCY_S)
    return 1 / token_s, n_prompt / (n_batches * stage_s + filled_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    turns = [(run(given.file, given, divided=False), run(given.file, given, divided=True)) for _ in range(given.turns)]

    def median(which: int, name: str) -> float:
        return statistics.median(turn[which][name] for turn in turns)

    peaks = median(1, "peak"), median(1, "worker peak")
    share = ", ".join(f"{peak / median(0, 'peak'):.2f}" for peak in peaks)
    print(f"peak of memory: alone {median(0, 'peak') / 1e6:.0f} MB; caller and worker {share} of it")
    n_batches = -(-given.prompt // N_BATCH)
    bounds = {"generation": 1.0, "prompt": 2 * n_batches / (n_batches + 1)}
    found: dict[str, Any] = {"peaks": share}
    for name, bound in bounds.items():
        ratio = statistics.median(divided[name] / alone[name] for alone, divided in turns)
        found[name] = {"alone": median(0, name), "divided": median(1, name), "of the bound": ratio / bound}
        print(
            f"{name}: {median(0, name):.1f} tokens/s alone, {median(1, name):.1f} divided, "
            f"{ratio / bound:.2f} of the bound"
        )
    alone = {name: median(0, name) for name in turns[0][0]}
    for bits in (1e9, 1e10):
        for n_nodes in (2, 4, 8):
            generation, prompt = simulated(alone, n_nodes, bits, 4096)
            print(
                f"simulated, {bits / 1e9:.0f} Gbit/s, {n_nodes} nodes: "
                f"{generation:.1f} tokens/s of a text, {prompt:.0f} of a prompt of 4096 tokens"
            )
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])))
    else:
        main()

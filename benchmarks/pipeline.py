#!/usr/bin/env python3
"""Measure a model that is divided among two processes.

    python benchmarks/pipeline.py FILE.gguf [--tokens 32] [--prompt 1024] [--turns 3] [--peer BIN] [--json OUT.json]

One process alone, with one thread, and this model divided in equal shares among a caller and a `llamacli worker` on the
loopback, by layers and by rows, take turns. Prints memory (the peak of each, beside the process alone), and tokens a
second of one text's generation and of a prompt: as such, to the process alone, and in units of the bound. The bound of
layers is: generation as fast as alone, as one text is in one stage at a time, and a prompt twice as fast, less the time
in which the pipeline fills; that of rows: twice as fast. Both processes read the same memory. Then simulates links of
1 and 10 Gbit/s and 2 to 8 nodes, of one thread each, from the processor time of the process alone: layers divided
(pipeline parallelism), and rows of each product divided (all-gather: each node sends its part of a vector to all
others, four times a layer and once for the logits; no sums are divided).
`--peer` is the folder of llama.cpp's `ggml-rpc-server` and `llama-bench`, built with GGML_RPC: llama.cpp with one
thread, and on two RPC servers of one thread each, by layers (`-sm layer`) and within tensors (`-sm tensor`), take turns
with the others, with the same prompt and as many tokens behind it.
`--json` writes the simulated rows as benchmarks/results has them, with what was measured as the note.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECRET = b"a secret of the benchmark"
N_BATCH = 512
"""Tokens of a batch of a prompt."""

N_PIECE = 128
"""Tokens of a batch of a pipeline, but with experts."""

N_PROMPT = 4096
"""Tokens of a simulated prompt."""

ALONE, LAYER, ROW = MODES = "alone", "layer", "row"
PEERS = {ALONE: "none", LAYER: "layer", ROW: "tensor"}
"""Split modes of llama.cpp that divide the same."""

WHAT = ("one text", "a text for each node", "prompt")
SPEEDS = {"generation cpu": "text", "prompt cpu": "prompt"}

LATENCY_S = 1e-4
"""Time of a message in a network of one building, one way."""


def measure(path: Path, n_prompt: int, n_tokens: int, mode: str, address: str) -> dict[str, float]:
    """Speeds and peak of this process, alone or with a worker."""
    from llamacli import load_model
    from llamacli.stages.frames import address_of
    from llamacli.stages.link import StagedEngine
    from llamacli.util.settings import SplitMode
    from llamacli.util.system import peak_rss

    engine = None
    if address:
        engine = StagedEngine([address_of(address)], SECRET, mode=SplitMode(mode), threads=1, split=[1, 1])
    prompt = [100 + (i * 31) % 5000 for i in range(n_prompt)]
    with (
        load_model(path, threads=1, engine=engine) as model,
        model.create_session(n_ctx=n_prompt + n_tokens + 8, reuse=False) as session,
    ):
        session.eval(prompt[:16])
        session.rewind(0)
        times = [_now()]
        session.eval(prompt)
        times.append(_now())
        for token in prompt[:n_tokens]:
            session.eval([token])
        times.append(_now())
        config = model.config
    (prompt_s, prompt_cpu_s), (token_s, token_cpu_s) = (
        [after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(times)
    )
    return {
        "prompt": n_prompt / prompt_s,
        "prompt cpu": n_prompt / prompt_cpu_s,
        "generation": n_tokens / token_s,
        "generation cpu": n_tokens / token_cpu_s,
        "peak": float(peak_rss() or 0),
        "width": config.n_embd,
        "layers": config.n_layer,
        "gathered": config.n_layer * (3 * config.n_embd + config.n_ff),
        "vocabulary": config.n_vocab,
    }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def run(path: Path, given: argparse.Namespace, mode: str) -> dict[str, float]:
    """Measure in processes of their own: alone, or divided in a mode."""
    worker, address = None, ""
    with tempfile.TemporaryDirectory() as folder:
        if mode != ALONE:
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
            command = [
                sys.executable,
                __file__,
                "--child",
                str(path),
                str(given.prompt),
                str(given.tokens),
                mode,
                address,
            ]
            result: dict[str, float] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
            if worker is not None:
                result["worker peak"] = _peak(worker.pid)
        finally:
            if worker is not None:
                _end(worker)
    return result


def run_peer(given: argparse.Namespace, mode: str) -> dict[str, float]:
    """Measure llama.cpp in a mode, with RPC servers unless it is alone."""
    with contextlib.ExitStack() as ended:
        servers = list[subprocess.Popen[bytes]]()
        options = ["-m", str(given.file), "-t", "1", "-r", "1", "-o", "json", "-sm", PEERS[mode]]
        if mode == ALONE:
            options += ["-ngl", "0"]
        else:
            addresses = list[str]()
            for _ in range(2):
                port = _free_port()
                command = [str(given.peer / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                ended.callback(_end, servers[-1])
                addresses.append(f"127.0.0.1:{port}")
                _wait_for(port, servers[-1])
            options += ["-ngl", "99", "--rpc", ",".join(addresses), "-ts", "1/1"]

        def speed(*counts: str) -> float:
            command = [str(given.peer / "llama-bench"), *options, *counts]
            return float(json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))[0]["avg_ts"])

        result = {
            "prompt": speed("-p", str(given.prompt), "-n", "0"),
            "generation": speed("-p", "0", "-n", str(given.tokens), "-d", str(given.prompt)),
        }
        return result | {f"peak {i}": _peak(server.pid) for i, server in enumerate(servers)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        assert server.poll() is None, "the RPC server has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)


def _peak(pid: int) -> float:
    return 1024.0 * int(re.findall(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.communicate()


def beside_peer(turns: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of llama.cpp, and ours in units of them; printed too."""
    found = dict[str, Any]()
    for mode, split in PEERS.items():
        of_mode = found[f"llama.cpp {split}"] = dict[str, Any]()
        for name in ("generation", "prompt"):
            speed = statistics.median(turn[f"peer {mode}"][name] for turn in turns)
            ratio = statistics.median(turn[mode][name] / turn[f"peer {mode}"][name] for turn in turns)
            to_alone = statistics.median(turn[f"peer {mode}"][name] / turn[f"peer {ALONE}"][name] for turn in turns)
            measured = {"tokens/s": speed, "to alone": to_alone, f"llamacli {mode} in units of it": ratio}
            of_mode[name] = {what: float(f"{value:.3g}") for what, value in measured.items()}
            print(f"llama.cpp {split}, {name}: {of_mode[name]}")
        if mode != ALONE:
            peaks = [statistics.median(turn[f"peer {mode}"][f"peak {i}"] for turn in turns) for i in range(2)]
            of_mode["peaks of the servers, MB"] = ", ".join(f"{peak / 1e6:.0f}" for peak in peaks)
            print(f"llama.cpp {split}: peaks of memory of the servers {of_mode['peaks of the servers, MB']} MB")
    return found


def simulated(alone: dict[str, float], n_nodes: int, bits: float) -> list[float]:
    """Tokens a second of a text, of many, of a prompt.

    Many are as many as nodes. First with layers divided, then with rows. Nodes have equal shares. A message takes
    LATENCY_S and its bytes. A stage sends rows of the model's width while it computes the next batch.
    """
    step_s, batch_s = 1 / alone["generation cpu"], N_BATCH / alone["prompt cpu"]
    number_s = 32 / bits
    row_s, n_batches, n_pieces = number_s * alone["width"], N_PROMPT // N_BATCH, N_PROMPT // N_PIECE
    token_s = step_s + n_nodes * (LATENCY_S + row_s)  # back to the caller too
    stage_s, sending_s = batch_s / n_nodes * N_PIECE / N_BATCH, N_PIECE * row_s
    filled_s = (n_nodes - 1) * (stage_s + sending_s + LATENCY_S)
    layers = [1 / token_s, n_nodes / token_s, N_PROMPT / (n_pieces * max(stage_s, sending_s) + filled_s)]
    others, latency_s = (n_nodes - 1) / n_nodes, LATENCY_S * (4 * alone["layers"] + 1)
    gathered_s, logits_s = number_s * others * alone["gathered"], number_s * others * alone["vocabulary"]
    text_s = step_s / n_nodes + latency_s + gathered_s + logits_s
    texts_s = text_s + (n_nodes - 1) * (gathered_s + logits_s)  # one step reads the weights once for all texts
    prompt_s = n_batches * (batch_s / n_nodes + latency_s + N_BATCH * gathered_s)
    return [*layers, 1 / text_s, n_nodes / texts_s, N_PROMPT / prompt_s]


def main() -> None:
    """Measure and print."""
    from llamacli.util.system import cpu_name

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    turns = list[dict[str, dict[str, float]]]()
    for _ in range(given.turns):
        turns.append({})
        for mode in MODES:
            turns[-1][mode] = run(given.file, given, mode)
            if given.peer:
                turns[-1][f"peer {mode}"] = run_peer(given, mode)

    def median(mode: str, name: str) -> float:
        return statistics.median(turn[mode][name] for turn in turns)

    n_batches = -(-given.prompt // N_PIECE)
    bounds = {
        LAYER: {"generation": 1.0, "prompt": 2 * n_batches / (n_batches + 1)},
        ROW: {"generation": 2.0, "prompt": 2.0},
    }
    found: dict[str, Any] = {"alone": {name: float(f"{median(ALONE, name):.3g}") for name in bounds[ROW]}}
    for mode, of_mode in bounds.items():
        peaks = median(mode, "peak"), median(mode, "worker peak")
        share = ", ".join(f"{peak / median(ALONE, 'peak'):.2f}" for peak in peaks)
        found[mode] = {"peaks": share}
        print(f"{mode}: peak of memory of caller and worker {share} of {median(ALONE, 'peak') / 1e6:.0f} MB alone")
        for name, bound in of_mode.items():
            ratio = statistics.median(turn[mode][name] / turn[ALONE][name] for turn in turns)
            measured = {"tokens/s": median(mode, name), "to alone": ratio, "of the bound": ratio / bound}
            found[mode][name] = {what: float(f"{value:.3g}") for what, value in measured.items()}
            print(f"{mode}, {name}: {found[mode][name]}, {median(ALONE, name):.1f} tokens/s alone")
    if given.peer:
        found |= beside_peer(turns)
    alone = {name: median(ALONE, name) for name in turns[0][ALONE]}
    rows = [
        [f"{bits / 1e9:.0f}", n_nodes, *(float(f"{speed:.3g}") for speed in simulated(alone, n_nodes, bits))]
        for bits in (1e9, 1e10)
        for n_nodes in range(2, 9, 2)
    ]
    columns = ["Gbit/s", "nodes", *(f"{what}, {how}" for how in ("layers", "rows") for what in WHAT)]
    print(*("\t".join(map(str, row)) for row in [columns, *rows]), sep="\n")
    if given.json:
        speeds = ", ".join(f"{alone[name]:.3g} of a {what}" for name, what in SPEEDS.items())
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "title": f"Simulated tokens per second of {given.file.stem} on several nodes",
            "machine": f"simulated: nodes of one thread of {cpu_name()}, tokens a second of its time: {speeds}",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "command": "benchmarks/pipeline.py",
            "note": f"Messages take {1e3 * LATENCY_S:g} ms and their bytes; a prompt has {N_PROMPT} tokens.",
            "measured": found,
            "columns": columns,
            "rows": rows,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:7])))
    else:
        main()

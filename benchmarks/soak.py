#!/usr/bin/env python3
"""Load `llamacli serve` for a long time, and check that it leaks nothing.

    python benchmarks/soak.py [--seconds 3600] [MODEL.gguf]

Clients send chats, completions, embeddings and JSON Schemas, whole and as streams, and cut three in ten of them off at
a random moment. Resident memory, threads and open files of the server are sampled; after a warm-up, memory may grow by
1 MiB an hour (the slope of a line through the samples, less twice its standard error), and the numbers of threads and
files must stay the same. Every whole reply must have status 200, and equal requests equal texts. Ends with status 1 if
anything of that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

CUT = 0.3
MAX_SLOPE = 1 << 20
"""Bytes an hour."""
SAMPLES = 200
READY = re.compile(r"serving \S+ on http://127\.0\.0\.1:(\d+) ")
SCHEMA = {"type": "object", "properties": {"fox": {"enum": ["red", "grey"]}}, "required": ["fox"]}


@dataclass
class Load:
    """Requests of all clients, and what has come of them."""

    port: int
    ends: float
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, seed: int) -> None:
        """Send requests until the end."""
        draw = random.Random(seed)
        while time.monotonic() < self.ends and not self.faults:
            path, body = some_request(draw)
            cut = draw.random() < CUT
            try:
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
                    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
                    if cut:
                        time.sleep(draw.random() * 0.5)
                        outcome, reply = "cut off", b""
                    else:
                        response = connection.getresponse()
                        outcome, reply = str(response.status), response.read()
            except (OSError, http.client.HTTPException) as error:
                self.fault(f"{path}: {error!r}")
                return
            with self.lock:
                self.outcomes[outcome] += 1
            if not cut:
                self.check(path, body, outcome, reply)

    def check(self, path: str, body: dict[str, Any], status: str, reply: bytes) -> None:
        """Check a whole reply, against the reply to an equal request."""
        if status != "200" or (body.get("stream") and not reply.endswith(b"data: [DONE]\n\n")):
            self.fault(f"{path}: status {status}: {reply[-300:]!r}")
            return
        key, text = json.dumps([path, body]), texts_of(reply, stream=bool(body.get("stream")))
        if self.texts.setdefault(key, text) != text:
            self.fault(f"{path}: equal requests have different replies: {key}")

    def fault(self, text: str) -> None:
        """Note a fault, which ends the load."""
        self.faults.append(text)


def texts_of(reply: bytes, *, stream: bool) -> str:
    """Texts of a reply by choice, or its vectors or tokens.

    Pieces of a stream depend on the time, so they are joined.
    """
    lines = [line[6:] for line in reply.splitlines() if line.startswith(b"data: {")] if stream else [reply]
    texts: dict[int, str] = {}
    for event in map(json.loads, lines):
        for choice in event.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or "")
        texts |= {i: str(one["embedding"]) for i, one in enumerate(event.get("data", ()))}
        texts |= {0: str(event["tokens"])} if "tokens" in event else {}
    return json.dumps(texts, sort_keys=True)


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Request drawn from some hundred."""
    number = draw.randrange(20)
    kind = draw.choice(["chat", "text", "schema", "embedding", "tokens"])
    if kind == "embedding":
        return "/v1/embeddings", {"input": [f"a fox and {number} owls"] * 2}
    if kind == "tokens":
        return "/tokenize", {"content": f"There are {number} words. " * 40}
    body: dict[str, Any] = {"seed": number, "max_tokens": 8 + 4 * number, "stream": draw.random() < 0.5}
    if kind == "schema":
        return "/v1/completions", {**body, "prompt": "The fox is", "json_schema": SCHEMA, "max_tokens": 60}
    if kind == "text":
        return "/v1/completions", {**body, "prompt": f"Story {number}. " + "Once upon a time. " * number, "n": 2}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"Tell me of {number} foxes."}]}


def sample(process: psutil.Process) -> tuple[float, int, int, int]:
    """Time, bytes of resident memory, threads and open files of a process."""
    return time.monotonic(), process.memory_info().rss, process.num_threads(), process.num_fds()


def slope(samples: list[tuple[float, int, int, int]]) -> tuple[float, float]:
    """Growth of memory in bytes an hour, and its standard error."""
    times, sizes = (np.array([one[i] for one in samples], np.float64) for i in (0, 1))
    hours = (times - times.mean()) / 3600
    growth = float(hours @ (sizes - sizes.mean()) / (hours @ hours))
    rest = sizes - sizes.mean() - growth * hours
    # Neighbouring samples are alike: blocks of ten count as one.
    n = max(1, len(samples) // 10 - 2)
    return growth, float(np.sqrt(rest @ rest / len(samples) / n / (hours @ hours / len(samples))))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="model file; default: the demo model")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=6)
    options = parser.parse_args()
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    command = [sys.executable, "-m", "llamacli", "serve", *options.model, "--port", "0", "--max-running", "4"]
    if not options.model:
        command += ["--chat-template", template]  # the demo model has none
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        faults = soak(server, options)
    finally:
        server.terminate()
        server.wait(60)
    if server.returncode:
        faults.append(f"the server ended with status {server.returncode}")
    print("\n".join(faults) or "no fault")
    raise SystemExit(bool(faults))


def soak(server: subprocess.Popen[str], options: argparse.Namespace) -> list[str]:
    """Run clients against a server; the faults that were found."""
    assert server.stderr is not None
    ready = next((found for line in server.stderr if (found := READY.search(line))), None)
    if ready is None:
        return ["the server did not start"]
    threading.Thread(target=lambda lines: [None for _ in lines], args=[server.stderr], daemon=True).start()
    load = Load(int(ready[1]), time.monotonic() + options.seconds)
    clients = [threading.Thread(target=load.client, args=[seed]) for seed in range(options.clients)]
    for client in clients:
        client.start()
    samples, process = [], psutil.Process(server.pid)
    while any(client.is_alive() for client in clients):
        samples.append(sample(process))
        time.sleep(options.seconds / SAMPLES)
    time.sleep(2)  # the server notices the last connections that were cut
    calm = samples[len(samples) // 3 :]
    growth, error = slope(calm)
    threads = [one[2] for one in calm]
    files, after = max(one[3] for one in calm), sample(process)
    print(
        f"{sum(load.outcomes.values())} requests ({dict(load.outcomes)}); memory {calm[0][1] >> 20} to "
        f"{calm[-1][1] >> 20} MiB, slope {growth / (1 << 20):.2f} +- {error / (1 << 20):.2f} MiB an hour; "
        f"{min(threads)} to {max(threads)} threads; at most {files} files, {after[3]} in the end"
    )
    faults = load.faults
    if growth - 2 * error > MAX_SLOPE:
        faults.append("memory grows")
    if min(threads) != max(threads):
        faults.append("the number of threads changes")
    if after[3] > samples[0][3] + options.clients or files > samples[0][3] + 4 * options.clients:
        faults.append("open files grow")
    return faults


if __name__ == "__main__":
    main()

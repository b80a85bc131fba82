#!/usr/bin/env python3
"""Compare `llamacli serve` and llama-server over HTTP, alternating within one run.

    python benchmarks/serving.py FILE.gguf [--peer PATH_TO_LLAMA_SERVER] [-t 2] [-r 3] [--plot OUT.png]

Both serve the same file with the same number of threads, and get the same requests: prompts of token ids, greedy, with
`ignore_eos`. Without `--peer` only llamacli is measured. Prints a row per test: medians of both, and the median ratio
of neighbouring runs with its interquartile range. Speeds are better above 1, times and shares below.

- `output of N streams`: tokens a second of N requests at once, prompts included.
- `decode of 1 stream`: tokens a second from the first to the last of one request; `bench tg`: those of `llamacli bench`
  in a process of its own, after as long a prompt; `decode / bench tg`: the share that is left over HTTP.
- `longest gap`: seconds, the longest in which none of four streams has an event while a prompt of 2,000 tokens arrives
  (a single stream has none for a token that ends within a character); `longest gap / step`: in units of `--step-ms`.
- `first token alone`, `beside streams`, `second turn`: seconds to the first token of that prompt by itself, beside the
  streams, and of a prompt that continues it; `beside / alone`, `second turn / first`: their quotients.
- `health, p99`: seconds of `/health` meanwhile.

llama-server gets `-np` as many as there are streams, and a context for each slot as long as llamacli's; continuous
batching, flash attention and `--cache-reuse` are defaults of `--peer-options`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

STREAMS = (1, 4, 16)
LONG = 2000
PEER_OPTIONS = "-fa on -cb --cache-reuse 256 -b 2048 -ub 512 --no-webui"
WARM_UP = 32
"""Tokens of prompts and texts that are not measured."""
N_BESIDE = 4
START_S = 300


@dataclass
class Reply:
    """Times of a reply's events, and its number of tokens."""

    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    n_tokens: int = 0


class Server:
    """Server process, and requests to it."""

    def __init__(self, name: str, command: Sequence[str], port: int, n_vocab: int):
        self.name, self.port, self.n_vocab = name, port, n_vocab
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def ready(self) -> None:
        """Wait until the model is loaded."""
        for _ in range(START_S * 10):
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended with status {self._process.returncode}")
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
                if await self.health():
                    return
            await asyncio.sleep(0.1)
        raise SystemExit(f"{self.name} did not start within {START_S} seconds")

    async def health(self) -> bool:
        """True if the server says that it is well."""
        async with self.request("GET", "/health", b"") as (status, _, body):
            async for _ in body:
                pass
            return status == 200

    async def complete(self, prompt: Sequence[int], n: int, reply: Reply | None = None) -> Reply:
        """Stream a completion of n tokens."""
        reply = reply or Reply()
        fields = {"prompt": list(prompt), "max_tokens": n, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
        try:
            async with self.request("POST", "/v1/completions", data) as (status, _, body):
                if status != 200:
                    raise SystemExit(f"{self.name} refused a request with status {status}")
                async for line in body:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if event["choices"]:
                            reply.times.append(time.perf_counter())
                        if event.get("usage"):
                            reply.n_tokens = event["usage"]["completion_tokens"]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SystemExit(f"{self.name} cut a response; llama-server does if the file has no vocabulary") from None
        return reply

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, data: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
        """Status, headers and lines of the body of a response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            writer.write(head.encode() + f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
            chunked = headers.get("transfer-encoding") == "chunked"
            yield int(lines[0].split()[1]), headers, _lines(reader, chunked=chunked)
        finally:
            writer.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(60)


async def _lines(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """Lines of a body."""
    held = b""
    while True:
        if chunked:
            size = int(await reader.readuntil(b"\r\n"), 16)
            part = (await reader.readexactly(size + 2))[:-2]
        else:
            part = await reader.read(1 << 16)
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line
        if not part:
            if held:
                yield held
            return


class Prompts:
    """Random prompts, each a new one, the same for both servers."""

    def __init__(self, seed: int, n_vocab: int):
        self._random, self._n_vocab = random.Random(seed), n_vocab

    def new(self, n: int) -> list[int]:
        """Prompt of n tokens."""
        return self._random.choices(range(min(300, self._n_vocab // 2), self._n_vocab), k=n)


async def output_speed(server: Server, prompts: Prompts, n_streams: int, n_prompt: int, n_gen: int) -> dict[str, float]:
    """Tokens a second of streams at once.

    Of one stream also without its prompt.
    """
    started = time.perf_counter()
    replies = await asyncio.gather(*(server.complete(prompts.new(n_prompt), n_gen) for _ in range(n_streams)))
    speed = sum(reply.n_tokens for reply in replies) / (time.perf_counter() - started)
    figures = {f"output of {n_streams} stream{'s' * (n_streams > 1)}": speed}
    if n_streams == 1:
        times = replies[0].times
        figures["decode of 1 stream"] = (replies[0].n_tokens - 1) / (times[-1] - times[0])
    return figures


def bench_speed(options: argparse.Namespace) -> float:
    """Tokens a second of `llamacli bench` after a prompt."""
    command = [sys.executable, "-m", "llamacli", "bench", "-m", options.file, "-p", "0", "-r", "1", "-o", "json"]
    command += ["-n", str(options.n_gen), "-d", str(options.n_prompt), "-t", str(options.threads)]
    (test,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return float(test["avg_ts"])


async def long_prompt(server: Server, prompts: Prompts, n_long: int, step_ms: float) -> dict[str, float]:
    """Times of a long prompt: alone, continued, and beside streams."""
    prompt = prompts.new(n_long)
    alone = await server.complete(prompt, 1)
    second = await server.complete([*prompt, *prompts.new(50)], 1)
    replies = [Reply() for _ in range(N_BESIDE)]
    streams = [asyncio.create_task(server.complete(prompts.new(32), 400, reply)) for reply in replies]
    while any(len(reply.times) < 8 for reply in replies):
        await asyncio.sleep(0.01)
    health: list[float] = []

    async def poll() -> None:
        while True:
            started = time.perf_counter()
            await server.health()
            health.append(time.perf_counter() - started)
            await asyncio.sleep(0.02)

    polling = asyncio.create_task(poll())
    beside = await server.complete(prompts.new(n_long), 1)
    polling.cancel()
    ended = beside.times[0]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, polling, return_exceptions=True)
    times = sorted(time for reply in replies for time in reply.times)
    times = [*(time for time in times if time <= ended), min((time for time in times if time > ended), default=ended)]
    gaps = [b - a for a, b in itertools.pairwise(times) if b >= beside.started]
    first, crowded, again = (reply.times[0] - reply.started for reply in (alone, beside, second))
    return {
        "longest gap": max(gaps),
        "longest gap / step": max(gaps) / (step_ms / 1000),
        "first token alone": first,
        "first token beside streams": crowded,
        "beside / alone": crowded / first,
        "second turn": again,
        "second turn / first": again / first,
        "health, p99": sorted(health)[int(0.99 * (len(health) - 1))],
    }


async def measure(servers: Sequence[Server], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Figures: test -> server -> repetition; servers alternate, after a short warm-up.

    What is not measured of the peer is NaN.
    """
    results: dict[str, list[list[float]]] = {}
    for server in servers:
        prompts = Prompts(0, server.n_vocab)
        for n in (1, max(options.streams)):
            await output_speed(server, prompts, n, WARM_UP, WARM_UP)
        await server.complete(prompts.new(options.long // 4), 1)
    for repetition in range(1, options.repetitions + 1):
        bench = await asyncio.to_thread(bench_speed, options) if 1 in options.streams else math.nan
        for i, server in enumerate(servers):
            prompts = Prompts(repetition, server.n_vocab)
            figures: dict[str, float] = {}
            for n in options.streams:
                figures |= await output_speed(server, prompts, n, options.n_prompt, options.n_gen)
            if 1 in options.streams:
                figures["bench tg"] = math.nan if i else bench
                figures["decode / bench tg"] = math.nan if i else figures["decode of 1 stream"] / bench
            figures |= await long_prompt(server, prompts, options.long, options.step_ms)
            for name, figure in figures.items():
                results.setdefault(name, [[] for _ in servers])[i].append(figure)
        print(f"repetition {repetition} of {options.repetitions} done", file=sys.stderr, flush=True)
    return results


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(path: str, options: argparse.Namespace) -> Iterator[Server]:
    """Start the servers with room for all streams."""
    import llamacli

    n_vocab = llamacli.load_tokenizer(path).n_vocab
    most, n_ctx = max(*options.streams, N_BESIDE + 1), max(options.long + 128, options.n_prompt + options.n_gen + 64)
    threads, port = str(options.threads), free_port()
    common = ["--port", str(port), "--threads", threads]
    ours = ["serve", path, *common, "--ctx-size", str(n_ctx), "--max-running", str(most)]
    yield Server(
        "llamacli", [sys.executable, "-m", "llamacli", *ours, "--step-ms", str(options.step_ms)], port, n_vocab
    )
    if options.peer:
        port = free_port()
        sizes = ["-np", str(most), "-c", str(most * n_ctx), *options.peer_options.split()]
        command = [options.peer, "-m", path, "--port", str(port), "-t", threads, "-tb", threads, "-ngl", "0", *sizes]
        yield Server("llama-server", command, port, n_vocab)


def rows(results: dict[str, list[list[float]]]) -> Iterator[tuple[str, list[float]]]:
    """Rows of the table: test, medians, ratio and its quartiles."""
    for test, (ours, *peers) in results.items():
        figures = [statistics.median(ours), *map(statistics.median, peers)]
        if peers:
            ratios = sorted(a / b for a, b in zip(ours, peers[0], strict=True))
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            figures += [statistics.median(ratios), low, high]
        yield test, figures


def plot(table: Sequence[tuple[str, list[float]]], out: str) -> None:
    """Plot ratios of speed as bars; times are inverted."""
    import matplotlib.pyplot as plt

    names: list[str] = []
    bars: list[float] = []
    errors: list[list[float]] = [[], []]
    for test, (*_, ratio, low, high) in table:
        if "/" in test or math.isnan(ratio):
            continue
        is_speed = test.startswith(("output", "decode"))
        values = (ratio, low, high) if is_speed else (1 / ratio, 1 / high, 1 / low)
        names.append(test.replace(" ", "\n"))
        bars.append(values[0])
        errors[0].append(values[0] - values[1])
        errors[1].append(values[2] - values[0])
    figure, axes = plt.subplots(figsize=(1 + 1.1 * len(names), 4), layout="constrained")
    axes.bar(names, bars, yerr=errors, capsize=4, color=["#4c78a8" if bar >= 1 else "#e45756" for bar in bars])
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("speed, llama-server = 1")
    axes.tick_params(axis="x", labelsize=7)
    figure.savefig(out, dpi=150)


async def run(options: argparse.Namespace) -> list[tuple[str, list[float]]]:
    """Start the servers, measure, and print the table."""
    servers: list[Server] = []
    try:
        servers += start(options.file, options)
        for server in servers:
            await server.ready()
        table = list(rows(await measure(servers, options)))
    finally:
        for server in servers:
            server.stop()
    names = [server.name for server in servers]
    heads = ["test", *names, *(["ratio", "middle half"] if len(names) > 1 else [])]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for test, figures in table:
        cells = [f"{figure:.3g}" for figure in figures[: len(names) + 1]]
        if len(figures) > len(names):
            cells.append(f"{figures[-2]:.2f} to {figures[-1]:.2f}")
        print(f"| {test} | {' | '.join(cells)} |".replace("nan to nan", "").replace(" nan ", " "), flush=True)
    return table


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--peer", metavar="LLAMA_SERVER")
    parser.add_argument("--peer-options", default=PEER_OPTIONS, help="further options of llama-server [%(default)s]")
    parser.add_argument("-p", "--n-prompt", type=int, default=128)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("--long", type=int, default=LONG)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--plot", metavar="OUT.png")
    options = parser.parse_args()
    table = asyncio.run(run(options))
    if options.plot and options.peer:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

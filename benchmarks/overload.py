#!/usr/bin/env python3
"""Load `llamacli serve` with Poisson arrivals, below and above its capacity.

    python benchmarks/overload.py [FILE.gguf] [--seconds 600] [-p 256] [-n 64]

Measures in one run: the time to the first token of requests that are alone; the capacity, with twice as many clients as
texts that run at once (no more than are not refused), each of which sends its next request when it has a reply; then
`--seconds` of requests at random times with 0.7 of the capacity, and as many seconds with twice the capacity. The
capacity is measured again after each part, and a part is compared with the mean of those before and after it, since the
speed of a shared machine drifts. Prompts are new random token ids, so that none is cached, and texts have equal lengths
(`ignore_eos`).

Requests a second are the tokens that `/metrics` counts: the mean of prompt tokens and of generated tokens, each as a
share of a request's. Replies that end would not do in so short a time: equal requests end in groups, so that a part of
15 seconds was wrong by up to 6 %. The load itself takes about 0.01 of a core, whatever is measured.

- `first token, p95 / alone` at 0.7: at most 3, and no request is refused. Prompts in turn, each as long as alone
  (M/D/1), would give 2.6 if they take 0.41 of the time, and 2.9 at 0.48.
- `served / capacity` at 2.0: at least 0.95. Beside other programs judge by `per CPU second`: the same quotient for each
  second that the server computes.
- `refusal, p99`: seconds until status 429, at most 0.05. `memory`: growth in MiB an hour, below 1 or its own error; a
  short run has a large one.

Ends with status 1 if a reply is cut, a refusal has no `Retry-After`, or a status is neither 200 nor 429.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import psutil
from serving import Prompts, Server, free_port
from soak import SAMPLES, sample, slope

BELOW, ABOVE = 0.7, 2.0
"""Shares of the capacity."""
N_ALONE = 10
WARM_UP = 0.2
"""Share of a part's time before its replies are counted."""
MIN_CAPACITY_S = 30.0
N_CLIENTS, FEWEST = 64, 8
"""Clients that measure the capacity, without `--max-running`: twice the texts that run at once. These are 8 or more."""

Row = tuple[str, float, str, bool | None]
"""Name of a figure, its value, the aim, and whether it is met; None without one."""


@dataclass
class Attempt:
    """Request: its times in seconds, and its outcome."""

    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    answered: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    whole: bool = False
    retry_after: str | None = None

    @property
    def fault(self) -> str | None:
        """Fault of the reply, None for none."""
        if self.status == 200:
            return None if self.whole else "a reply was cut"
        if self.status == 429:
            return None if self.retry_after else "a refusal has no Retry-After"
        return f"status {self.status}" if self.status else "a connection was lost"


@dataclass
class Rate:
    """Requests served a second, and for each CPU second of the server."""

    per_second: float
    per_cpu: float


class Load:
    """Requests of one shape to a server."""

    def __init__(self, server: Server, options: argparse.Namespace):
        self._server, self._options = server, options
        self._prompts, self._draw = Prompts(1, server.n_vocab), random.Random(1)
        self.attempts: list[Attempt] = []

    async def send(self) -> Attempt:
        """Stream a completion."""
        prompt, n_gen = self._prompts.new(self._options.n_prompt), self._options.n_gen
        fields = {"prompt": prompt, "max_tokens": n_gen, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps(fields).encode()
        one = Attempt()
        self.attempts.append(one)
        try:
            async with self._server.request("POST", "/v1/completions", data) as (status, headers, body):
                one.answered = time.perf_counter()
                one.status, one.retry_after = status, headers.get("retry-after")
                async for line in body:
                    if line.startswith(b"data: {") and not one.first:
                        one.first = time.perf_counter()
                    one.whole = one.whole or line == b"data: [DONE]"
        except (OSError, asyncio.IncompleteReadError):
            one.whole = False
        one.ended = time.perf_counter()
        return one

    async def alone(self) -> float:
        """Median seconds to the first token of requests without others."""
        times = [one.first - one.started for one in [await self.send() for _ in range(N_ALONE)]]
        return statistics.median(times)

    async def capacity(self, seconds: float) -> Rate:
        """Rate that clients get which wait for each reply."""
        began = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() < began + seconds:
                await self.send()

        counting = asyncio.create_task(self._rate(seconds))
        running, queue = self._options.max_running, self._options.max_queue
        n_clients = min(2 * running, running + queue) if running else min(N_CLIENTS, FEWEST + queue)
        await asyncio.gather(*(client() for _ in range(n_clients)))
        return await counting

    async def arrivals(self, per_second: float, seconds: float) -> tuple[list[Attempt], Rate]:
        """Requests at random times, and the rate of replies."""
        began = at = time.perf_counter()
        counting = asyncio.create_task(self._rate(seconds))
        tasks = []
        while (at := at + self._draw.expovariate(per_second)) < began + seconds:
            await asyncio.sleep(at - time.perf_counter())
            tasks.append(asyncio.create_task(self.send()))
        attempts = await asyncio.gather(*tasks)
        return attempts, await counting

    async def _rate(self, seconds: float) -> Rate:
        """Requests served in a part's time, after the warm-up."""
        await asyncio.sleep(WARM_UP * seconds)
        before, began = await self._state(), time.perf_counter()
        await asyncio.sleep((1 - WARM_UP) * seconds)
        after, took = await self._state(), time.perf_counter() - began
        prompt, generated, cpu = (b - a for a, b in zip(before, after, strict=True))
        served = (prompt / self._options.n_prompt + generated / self._options.n_gen) / 2
        return Rate(served / took, served / cpu)

    async def _state(self) -> tuple[float, float, float]:
        """Tokens of prompts and of texts, and CPU seconds of the server."""
        found = dict.fromkeys((b"llamacli_prompt_tokens_total", b"llamacli_generation_tokens_total"), 0.0)
        async with self._server.request("GET", "/metrics", b"") as (_, _, body):
            async for line in body:
                name = line.partition(b"{")[0]
                if name in found:
                    found[name] += float(line.rpartition(b" ")[2])
        prompt, generated = found.values()
        cpu = psutil.Process(self._server.pid).cpu_times()
        return prompt, generated, cpu.user + cpu.system


def percentile(values: Sequence[float], share: float) -> float:
    """Value that `share` of the values do not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


async def sampled(pid: int, seconds: float) -> list[tuple[float, int, int, int]]:
    """Memory, threads and files of a process, sampled until cancelled."""
    samples, process = [], psutil.Process(pid)
    try:
        while True:
            samples.append(sample(process))
            await asyncio.sleep(seconds / SAMPLES)
    except asyncio.CancelledError:
        return samples


async def measure(load: Load, pid: int, options: argparse.Namespace) -> AsyncIterator[Row]:
    """Figures of all parts, as they are known."""
    seconds, pause = options.seconds, max(MIN_CAPACITY_S, options.seconds / 10)
    await load.capacity(pause)  # the server learns the times of its steps
    alone = await load.alone()
    before = await load.capacity(pause)
    yield "first token alone, s", alone, "", None
    yield "capacity, requests/s", before.per_second, "", None

    attempts, _ = await load.arrivals(BELOW * before.per_second, seconds)
    first = [one.first - one.started for one in attempts if one.whole]
    refused = sum(one.status == 429 for one in attempts)
    between = await load.capacity(pause)
    share = len(attempts) / seconds / statistics.mean((before.per_second, between.per_second))
    yield "requests / capacity, below", share, "", None
    yield "first token, median, s", percentile(first, 0.5), "", None
    yield "first token, p95, s", percentile(first, 0.95), "", None
    ratio = percentile(first, 0.95) / alone
    yield "first token, p95 / alone", ratio, "<= 3", ratio <= 3
    yield "refused", refused, "0", not refused

    sampling = asyncio.create_task(sampled(pid, seconds))
    attempts, served = await load.arrivals(ABOVE * between.per_second, seconds)
    sampling.cancel()
    samples = await sampling
    after = await load.capacity(pause)
    capacity = statistics.mean((between.per_second, after.per_second))
    per_cpu = served.per_cpu / statistics.mean((between.per_cpu, after.per_cpu))
    refusals = [one.answered - one.started for one in attempts if one.status == 429]
    if not refusals:
        raise SystemExit("no request was refused: the queue is too long for --seconds")
    growth, error = (one / (1 << 20) for one in slope(samples[len(samples) // 3 :]))
    yield "requests / capacity, above", len(attempts) / seconds / capacity, "", None
    yield "served / capacity", served.per_second / capacity, ">= 0.95", served.per_second >= 0.95 * capacity
    yield "served / capacity, per CPU second", per_cpu, ">= 0.95", per_cpu >= 0.95
    yield "refused / all", len(refusals) / len(attempts), "", None
    yield "refusal, median, s", statistics.median(refusals), "", None
    yield "refusal, p99, s", percentile(refusals, 0.99), "<= 0.05", percentile(refusals, 0.99) <= 0.05
    yield "memory, MiB", samples[-1][1] / (1 << 20), "", None
    yield "memory, growth in MiB an hour", growth, f"<= 1 or {2 * error:.1f}", growth <= max(1, 2 * error)


async def run(options: argparse.Namespace) -> list[str]:
    """Start the server, measure, and print the table; the faults."""
    from llamacli import load_tokenizer
    from llamacli.hub.demo import demo_path

    port, n_ctx = free_port(), options.n_prompt + options.n_gen + 64
    command = [sys.executable, "-m", "llamacli", "serve", *([options.file] if options.file else [])]
    command += ["--port", str(port), "--threads", str(options.threads), "--ctx-size", str(n_ctx)]
    command += ["--max-queue", str(options.max_queue)]
    command += ["--max-running", str(options.max_running)] if options.max_running else []
    n_vocab = load_tokenizer(options.file or demo_path()).n_vocab
    server = Server("llamacli", command, port, n_vocab)
    load = Load(server, options)
    try:
        await server.ready()
        print("| figure | value | aim | met |\n|---|---|---|---|")
        async for name, value, aim, met in measure(load, server.pid, options):
            print(f"| {name} | {value:.3g} | {aim} | {'' if met is None else 'yes' if met else 'no'} |", flush=True)
    finally:
        server.stop()
    faults = Counter(filter(None, (one.fault for one in load.attempts)))
    return [f"{n} times: {fault}" for fault, n in faults.items()]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="model file; default: the demo model")
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds of each part [%(default)s]")
    parser.add_argument("-p", "--n-prompt", type=int, default=256)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--max-running", type=int, help="default: the server's")
    parser.add_argument("--max-queue", type=int, default=64)
    faults = asyncio.run(run(parser.parse_args()))
    print("\n".join(faults) or "no fault")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()

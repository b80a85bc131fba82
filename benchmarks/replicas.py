#!/usr/bin/env python3
"""Simulate replicas behind the router of `llamacli serve --ray`, with measured step times.

    python benchmarks/replicas.py [--replicas 1,2,10,100,1000] [--load 0.8] [--base-ms 25] [--row-ms 2] [--requests 20]

The policy is the code that serves (`llamacli.serve.ray.policy`), with reports a second old. The replicas are simulated:
a step takes `base` + `row` * rows, as `llamacli.generation.costs` measures it (the defaults: a 1B model in Q8_0 on two
cores), prompts are evaluated in pieces of `--step-ms`, and the cache keeps the latest blocks. Requests come
at random times: half begin with one of some system prompts, few of which are common (Zipf), half go on with a
conversation. Compared are `cost`, `least` (fewest requests that run or wait, known without delay) and `random`. Prints,
for each number of replicas and policy:

- `tok/s`: prompt and output tokens a second of a replica, at `--load` of what it can do without a cache.
- `hits`: share of the prompts' tokens that the cache had.
- `first token p50`, `p95`: seconds from a request to its first token.
- `route`: milliseconds of the policy for a request.

Then the greatest throughput of each number of replicas to that of one, with requests five times what they can do.

`--hop STREAMS` measures the way from a replica to the server instead, with Ray on this machine: milliseconds from an
event of a stream to its arrival, at 50 events a second of each stream.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import heapq
import itertools
import logging
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from llamacli.serve.ray.blocks import BLOCK, n_matched
from llamacli.serve.ray.policy import Fleet, Load
from llamacli.serve.requests import TextDelta

SLOTS = 8
CACHE_BLOCKS = 1024
REPORT_S = 1.0
PROMPTS_PER_REPLICA, ZIPF = 4, 1.1
SYSTEM, USER, OUTPUT = (8, 24), (64, 256), (32, 192)
MAX_PROMPT = 4096
THINK_S = 10.0


@dataclass(eq=False)
class Text:
    """Request: hashes of its prompt's blocks, lengths, and tokens left."""

    at: float
    hashes: tuple[bytes, ...]
    n_prompt: int
    n_output: int
    name: str = ""
    missing: int = 0
    left: int = 0
    first_at: float | None = None


@dataclass(eq=False)
class Costs:
    """Step times in seconds."""

    base: float
    row: float
    step: float

    def capacity(self, n_prompt: float, n_output: float) -> float:
        """Requests a second of a replica without a cache."""
        return 1 / (n_prompt * self.row + n_output * (self.base + self.row * SLOTS) / SLOTS)


@dataclass(eq=False)
class Machine:
    """Simulated replica."""

    costs: Costs
    now: float = 0.0
    prompts: list[Text] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    queue: collections.deque[Text] = field(default_factory=collections.deque)
    cache: collections.OrderedDict[bytes, None] = field(default_factory=collections.OrderedDict)
    blocks: frozenset[bytes] | None = None
    received: list[str] = field(default_factory=list)
    done: list[Text] = field(default_factory=list)
    n_prompt = n_hit = 0

    def put(self, text: Text) -> None:
        """Queue a request."""
        self.now = max(self.now, text.at) if not self.busy else self.now
        self.queue.append(text)
        self.received.append(text.name)

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(self.prompts or self.texts or self.queue)

    def advance(self, until: float) -> None:
        """Run steps that begin before a time."""
        while self.busy and self.now < until:
            self._admit()
            costs, n = self.costs, len(self.texts)
            chunk = 0
            if self.prompts:
                room = int((costs.step - costs.base) / costs.row) - n
                chunk = min(self.prompts[0].missing, 512, max(32, room))
            seconds = costs.base + costs.row * (n + chunk)
            steps = 1
            if not self.prompts:
                ends = math.ceil((until - self.now) / seconds) if until < math.inf else self.texts[0].left
                steps = max(1, min(ends, *(text.left for text in self.texts)))
            self.now += steps * seconds
            for text in self.texts:
                text.left -= steps
            if chunk:
                self._evaluated(self.prompts[0], chunk)
            for text in [text for text in self.texts if text.left <= 0]:
                self.texts.remove(text)
                self.done.append(text)

    def _admit(self) -> None:
        while self.queue and len(self.prompts) + len(self.texts) < SLOTS:
            text = self.queue.popleft()
            n = n_matched(text.hashes, self.cache.keys())  # type: ignore[arg-type]
            text.missing = max(1, text.n_prompt - n * BLOCK)
            self.n_prompt += text.n_prompt
            self.n_hit += text.n_prompt - text.missing
            self.prompts.append(text)

    def _evaluated(self, text: Text, chunk: int) -> None:
        text.missing -= chunk
        if text.missing:
            return
        self.prompts.remove(text)
        text.first_at, text.left = self.now, text.n_output - 1
        self.texts.append(text)
        for block in reversed(text.hashes):  # a prompt's beginning is used last, so that its end goes first
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        self.blocks = None

    def load(self) -> Load:
        """Report for the router."""
        if self.blocks is None:
            self.blocks = frozenset(self.cache)
        tokens = sum(text.missing for text in self.prompts) + sum(text.n_prompt for text in self.queue)
        running = len(self.prompts) + len(self.texts)
        output = statistics.fmean(OUTPUT)
        costs = self.costs
        return Load(running, len(self.queue), SLOTS, tokens, costs.base, costs.row, output, self.blocks)


class Workload:
    """Requests at random times, the earliest first."""

    def __init__(self, n_replicas: int, n_requests: int, rate: float, seed: int):
        self._random = random.Random(seed)
        self._blocks = itertools.count()
        n_prompts = PROMPTS_PER_REPLICA * n_replicas
        self._systems = [self._new(self._random.randint(*SYSTEM)) for _ in range(n_prompts)]
        self._weights = list(itertools.accumulate(1 / (i + 1) ** ZIPF for i in range(n_prompts)))
        self._turns: list[tuple[float, int, tuple[bytes, ...]]] = []
        self._n, self._rate = n_requests, rate

    def _new(self, n: int) -> tuple[bytes, ...]:
        return tuple(next(self._blocks).to_bytes(8) for _ in range(n))

    def __iter__(self) -> Iterator[Text]:
        now, draw = 0.0, self._random
        for i in range(self._n):
            now += draw.expovariate(self._rate) if self._rate < math.inf else 0.0
            if self._turns and draw.random() < 0.5 and (self._turns[0][0] <= now or self._rate == math.inf):
                before = heapq.heappop(self._turns)[2]
            else:
                before = draw.choices(self._systems, cum_weights=self._weights)[0]
            n_user, n_output = draw.randint(*USER), draw.randint(*OUTPUT)
            hashes = before + self._new(n_user // BLOCK)
            n_prompt = len(before) * BLOCK + n_user
            yield Text(now, hashes, n_prompt, n_output, str(i))
            after = hashes + self._new(n_output // BLOCK)
            if len(after) * BLOCK < MAX_PROMPT:
                heapq.heappush(self._turns, (now + THINK_S + draw.expovariate(1 / THINK_S), i, after))


Choose = Callable[[Text, list[Machine], Fleet], int]


def by_cost(text: Text, machines: list[Machine], fleet: Fleet) -> int:
    """The policy of the router."""
    chosen = fleet.order(text.hashes, text.n_prompt)[0]
    fleet.route(text.name, chosen, text.hashes, text.n_prompt)
    return int(chosen)


def by_requests(text: Text, machines: list[Machine], fleet: Fleet) -> int:
    """Fewest requests, as all replicas have them at this moment."""
    return min(range(len(machines)), key=lambda i: (len(machines[i].queue) + len(machines[i].received), i))


def at_random(text: Text, machines: list[Machine], fleet: Fleet) -> int:
    """Any replica."""
    return random.Random(text.name).randrange(len(machines))


POLICIES: dict[str, Choose] = {"cost": by_cost, "least": by_requests, "random": at_random}


@dataclass
class Result:
    """Numbers of one simulation."""

    rate: float
    hits: float
    first: list[float]
    route_ms: float


def simulate(n: int, choose: Choose, costs: Costs, texts: Sequence[Text]) -> Result:
    """Run all requests on `n` replicas."""
    machines = [Machine(costs) for _ in range(n)]
    clock = Clock()
    fleet = Fleet("simulation", clock)
    fleet.keep(map(str, range(n)))
    reports = [(REPORT_S * i / n, i) for i in range(n)]
    spent = 0.0
    for text in texts:
        while choose is by_cost and reports[0][0] <= text.at:
            clock.now, i = heapq.heappop(reports)
            machines[i].advance(clock.now)
            fleet.report(str(i), machines[i].load(), machines[i].received)
            machines[i].received = []
            heapq.heappush(reports, (clock.now + REPORT_S, i))
        clock.now = text.at
        if choose is by_requests:
            for machine in machines:
                machine.advance(text.at)
                machine.received = [""] * (len(machine.prompts) + len(machine.texts))
        started = time.perf_counter()
        chosen = choose(text, machines, fleet)
        spent += time.perf_counter() - started
        machines[chosen].advance(text.at)
        machines[chosen].put(text)
    for machine in machines:
        machine.advance(math.inf)
    done = [text for machine in machines for text in machine.done]
    assert len(done) == len(texts)
    tokens = sum(text.n_prompt + text.n_output for text in done)
    return Result(
        tokens / max(machine.now for machine in machines) / n,
        sum(machine.n_hit for machine in machines) / sum(machine.n_prompt for machine in machines),
        sorted((text.first_at or 0.0) - text.at for text in done),
        1000 * spent / len(texts),
    )


class Clock:
    """Clock of the simulation."""

    now = 0.0

    def __call__(self) -> float:
        """Present time."""
        return self.now


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile of ascending values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2,10,100,1000")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--base-ms", type=float, default=25.0)
    parser.add_argument("--row-ms", type=float, default=2.0)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--requests", type=int, default=60, help="for each replica")
    parser.add_argument("--hop", type=int, help="streams, to measure the way from a replica")
    arguments = parser.parse_args()
    if arguments.hop:
        measure_hop(arguments.hop)
        return
    costs = Costs(arguments.base_ms / 1000, arguments.row_ms / 1000, arguments.step_ms / 1000)
    sizes = [int(text) for text in arguments.replicas.split(",")]
    usual = [*Workload(10, 2000, costs.capacity(1000, 100), 0)]
    capacity = costs.capacity(
        statistics.fmean(text.n_prompt for text in usual), statistics.fmean(text.n_output for text in usual)
    )
    rate = arguments.load * capacity
    print("| replicas | policy | tok/s | hits | first token p50 | p95 | route |\n" + "|---" * 7 + "|")
    for n in sizes:
        for name, choose in POLICIES.items():
            got = simulate(n, choose, costs, [*Workload(n, n * arguments.requests, n * rate, n)])
            first = [quantile(got.first, share) for share in (0.5, 0.95)]
            print(
                f"| {n} | {name} | {got.rate:.0f} | {got.hits:.2f} | {first[0]:.2f} s | {first[1]:.2f} s "
                f"| {got.route_ms:.2f} ms |",
                flush=True,
            )
    print("\n| replicas | policy | throughput to one replica | hits |\n" + "|---" * 4 + "|")
    for name, choose in POLICIES.items():
        one = simulate(1, choose, costs, saturating(1, arguments.requests, capacity))
        for n in sizes[1:3]:
            got = simulate(n, choose, costs, saturating(n, arguments.requests, capacity))
            ratio = n * got.rate / one.rate
            print(f"| {n} | {name} | {ratio:.2f} | {got.hits:.2f} (one: {one.hits:.2f}) |", flush=True)


def saturating(n: int, n_requests: int, capacity: float) -> list[Text]:
    """Requests for one replica's prompts, five times what `n` can do."""
    return [*Workload(1, n * n_requests, 5 * n * capacity, 7)]


class Ticker:
    """Replica that sends the time."""

    async def ticks(self, n: int) -> AsyncIterator[list[tuple[float, TextDelta]]]:
        """Times of CLOCK_MONOTONIC, which is one clock for all processes."""
        for _ in range(n):
            await asyncio.sleep(random.uniform(0.015, 0.025))
            yield [(time.monotonic(), TextDelta(0, " word"))]


def measure_hop(n_streams: int, n_events: int = 500) -> None:
    """Print the quantiles of the time from a replica to the server."""
    import ray
    from ray import serve

    ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
    serve.start(proxy_location="Disabled")
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    ticker = serve.deployment(Ticker).options(max_ongoing_requests=1000, logging_config=quiet)
    handle = serve.run(ticker.bind(), name="hop", route_prefix=None).options(stream=True)

    async def read() -> list[float]:
        late = []
        async for ((sent, _),) in handle.ticks.remote(n_events):
            late.append(1000 * (time.monotonic() - sent))
        return late

    async def read_all() -> list[list[float]]:
        return await asyncio.gather(*(read() for _ in range(n_streams)))

    late = sorted(itertools.chain.from_iterable(asyncio.run(read_all())))
    shown = ", ".join(f"p{100 * share:.0f} {quantile(late, share):.2f} ms" for share in (0.5, 0.95, 0.99))
    print(f"{n_streams} streams: {shown}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

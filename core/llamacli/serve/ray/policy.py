"""Routing policy: the replica with the least cost in time.

Pure: neither Ray nor a clock of its own is needed.
"""

from __future__ import annotations

import collections
import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import attrs

from llamacli.serve.ray.blocks import BLOCK, n_matched

OUTPUT_TOKENS = 128.0
"""Tokens of a text, as long as a replica has not finished one."""
BASE_S, ROW_S = 0.025, 0.002
"""Seconds of a step and of a row, as long as no replica has measured one."""
FORGET_S = 10.0
"""Seconds after which a request that no report has confirmed counts no more."""


@attrs.frozen
class Load:
    """Load of a replica.

    - `running`, `waiting`: texts that run, and requests in the queue. `slots`: texts that can run at once.
    - `tokens`: tokens of prompts to be evaluated, of waiting and running requests.
    - `base_s`, `row_s`: seconds of a step, and of each row in it (`llamacli.serve.costs.StepCost`); None before the
      first step.
    - `output`: tokens of a text, on average.
    - `blocks`: hashes of the blocks of tokens in its cache.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 8
    tokens: int = 0
    base_s: float | None = None
    row_s: float | None = None
    output: float = OUTPUT_TOKENS
    blocks: frozenset[bytes] = frozenset()


@attrs.frozen
class Routed:
    """Request that was sent to a replica and is in no report yet."""

    hashes: Sequence[bytes]
    n_tokens: int
    at: float


def n_uncached(hashes: Sequence[bytes], n_tokens: int, blocks: frozenset[bytes]) -> int:
    """Tokens of a prompt that a cache does not hold; the last one is always computed."""
    return max(1, n_tokens - BLOCK * n_matched(hashes, blocks))


def cost_s(hashes: Sequence[bytes], n_tokens: int, load: Load, base_s: float = BASE_S, row_s: float = ROW_S) -> float:
    """Seconds that a request costs on a replica; the last arguments are for one without measured steps.

    The sum of: the rows of its prompt and of prompts before it; what running texts add to each of its steps; and, if no
    slot is free, the wait for one, when `slots` texts end in the time of one.
    """
    if load.base_s is not None and load.row_s is not None:
        base_s, row_s = load.base_s, load.row_s
    prompts = row_s * (n_uncached(hashes, n_tokens, load.blocks) + load.tokens)
    streams = row_s * load.running * load.output
    over = max(0, load.running + load.waiting + 1 - load.slots)
    text_s = load.output * (base_s + row_s * load.slots)
    return prompts + streams + over * text_s / load.slots


class Fleet:
    """Replicas with their loads, as one ingress knows them.

    What it has sent since a replica's last report is added to that report. All methods may be called from any thread.
    `ingress` decides between equal replicas, differently for each ingress.
    """

    def __init__(self, ingress: str = "", clock: Callable[[], float] = time.monotonic):
        self._ingress, self._clock = ingress, clock
        self._lock = threading.Lock()
        self._loads: dict[str, Load] = {}
        self._routed: collections.defaultdict[str, dict[str, Routed]] = collections.defaultdict(dict)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Ids of the replicas."""
        with self._lock:
            return tuple(self._loads)

    def keep(self, replicas: Iterable[str]) -> None:
        """Set which replicas there are; new ones count as idle."""
        with self._lock:
            present = set(replicas)
            for name in present - self._loads.keys():
                self._loads[name] = Load()
            for name in self._loads.keys() - present:
                del self._loads[name]
                self._routed.pop(name, None)

    def report(self, replica: str, load: Load, received: Iterable[str]) -> None:
        """Take a replica's report; `received` are the requests that it covers."""
        with self._lock:
            if replica in self._loads:
                self._loads[replica] = load
                for call in received:
                    self._routed[replica].pop(call, None)

    def route(self, call: str, replica: str, hashes: Sequence[bytes], n_tokens: int) -> None:
        """Count a request as sent to a replica; it may have counted for another."""
        with self._lock:
            for calls in self._routed.values():
                calls.pop(call, None)
            if replica in self._loads:
                self._routed[replica][call] = Routed(hashes, n_tokens, self._clock())

    def load(self, replica: str) -> Load:
        """Load of a replica, with what was sent since its report."""
        with self._lock:
            return self._load(replica)

    def order(
        self, hashes: Sequence[bytes], n_tokens: int, among: Iterable[str] | None = None, avoid: Iterable[str] = ()
    ) -> list[str]:
        """Replicas by ascending cost of a request, without those to avoid."""
        with self._lock:
            left = (self._loads.keys() if among is None else self._loads.keys() & set(among)) - set(avoid)
            loads = {name: self._load(name) for name in left}
        base_s, row_s = _usual(loads.values())
        return sorted(
            left, key=lambda name: (cost_s(hashes, n_tokens, loads[name], base_s, row_s), self._preference(name))
        )

    def _load(self, replica: str) -> Load:
        load, calls = self._loads[replica], self._routed[replica]
        oldest = self._clock() - FORGET_S
        for call in [call for call, routed in calls.items() if routed.at < oldest]:
            del calls[call]
        if not calls:
            return load
        blocks = set[bytes]()
        n_tokens = 0
        for routed in calls.values():
            n_tokens += n_uncached(routed.hashes, routed.n_tokens, load.blocks | blocks)
            blocks.update(routed.hashes)
        return attrs.evolve(
            load,
            running=min(load.slots, load.running + len(calls)),
            waiting=load.waiting + max(0, load.running + len(calls) - load.slots),
            tokens=load.tokens + n_tokens,
            blocks=load.blocks | blocks,
        )

    def _preference(self, replica: str) -> bytes:
        return hashlib.blake2b(f"{self._ingress} {replica}".encode(), digest_size=8).digest()


def _usual(loads: Iterable[Load]) -> tuple[float, float]:
    """Step times of the replicas that have measured some: the medians."""
    known = [(load.base_s, load.row_s) for load in loads if load.base_s is not None and load.row_s is not None]
    if not known:
        return BASE_S, ROW_S
    return statistics.median(base for base, _ in known), statistics.median(row for _, row in known)

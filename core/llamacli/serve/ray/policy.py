"""Routing policy: the replica with the least cost in time.

Pure: neither Ray nor a clock of its own is needed.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from llamacli.serve.ray.blocks import BLOCK, n_matched

OUTPUT_TOKENS = 128.0
"""Tokens of a text, as long as a replica has not finished one."""
BASE_S, ROW_S = 0.025, 0.002
"""Seconds of a step and of a row, as long as no replica has measured one."""
SUSPECT_S = 60.0
FORGET_S = 10.0
"""Seconds after which a request that no report has confirmed counts no more."""


@attrs.frozen
class Load:
    """Load of a replica.

    - `running`, `waiting`: sequences that run, and requests in the queue. `slots`: sequences that can run at once.
    - `tokens`: tokens of prompts to be evaluated, of waiting and running requests.
    - `base_s`, `row_s`: seconds of a step, and of each row in it (`llamacli.generation.costs.StepCost`); None before
      the first step.
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
    """Request that was sent to a replica, not reported yet."""

    hashes: Sequence[bytes]
    n_tokens: int
    at: float


def n_uncached(hashes: Sequence[bytes], n_tokens: int, blocks: frozenset[bytes]) -> int:
    """Tokens of a prompt that are not cached, at least one."""
    if not hashes or hashes[0] not in blocks:
        return max(1, n_tokens)
    return max(1, n_tokens - BLOCK * n_matched(hashes, blocks))


def cost_s(hashes: Sequence[bytes], n_tokens: int, load: Load, base_s: float = BASE_S, row_s: float = ROW_S) -> float:
    """Seconds that a request costs on a replica.

    `base_s` and `row_s` are for a replica that has not measured its own.

    The sum of: the rows of its prompt and of prompts before it; what running sequences add to each of its steps; and,
    if no slot is free, the wait for one, when `slots` sequences end in the time of one.
    """
    row_s = row_s if load.row_s is None else load.row_s
    return row_s * n_uncached(hashes, n_tokens, load.blocks) + _standing_s(load, base_s, row_s)


def _standing_s(load: Load, base_s: float, row_s: float) -> float:
    base_s = base_s if load.base_s is None else load.base_s
    over = max(0, load.running + load.waiting + 1 - load.slots)
    text_s = load.output * (base_s + row_s * load.slots)
    return row_s * load.tokens + row_s * load.running * load.output + over * text_s / load.slots


@attrs.define(eq=False)
class _Replica:
    """Replica as it was reported, and what was sent to it since.

    Until the time `suspect_until` it was silent, and comes last.

    `present` is its load with that, and its part of the cost, until something changes or the time `until`.
    """

    preference: bytes
    report: Load = Load()
    routed: dict[str, Routed] = attrs.field(factory=dict)
    present: tuple[Load, float] | None = None
    until: float = float("inf")
    suspect_until: float = float("-inf")

    def load(self, now: float) -> tuple[Load, float]:
        if self.present is None or now >= self.until:
            self.routed = {call: one for call, one in self.routed.items() if one.at > now - FORGET_S}
            self.until = min((one.at for one in self.routed.values()), default=float("inf")) + FORGET_S
            load = _with_routed(self.report, self.routed.values())
            self.present = load, 0.0 if load.row_s is None else _standing_s(load, BASE_S, load.row_s)
        return self.present


class Fleet:
    """Replicas with their loads, as one ingress knows them.

    What it has sent since a replica's last report is added to that report. All methods may be called from any thread.
    `ingress` decides between equal replicas, differently for each ingress.
    """

    def __init__(self, ingress: str = "", clock: Callable[[], float] = time.monotonic):
        self._ingress, self._clock = ingress, clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._places: dict[str, str] = {}  # of calls that are in no report yet

    @property
    def replicas(self) -> tuple[str, ...]:
        """Ids of the replicas."""
        with self._lock:
            return tuple(self._replicas)

    def keep(self, replicas: Iterable[str]) -> None:
        """Set which replicas there are; new ones count as idle."""
        with self._lock:
            present = set(replicas)
            for name in present - self._replicas.keys():
                digest = hashlib.blake2b(f"{self._ingress} {name}".encode(), digest_size=8).digest()
                self._replicas[name] = _Replica(digest)
            for name in self._replicas.keys() - present:
                del self._replicas[name]
            self._places = {call: name for call, name in self._places.items() if name in present}

    def report(self, replica: str, load: Load, received: Iterable[str]) -> None:
        """Take a replica's report; `received` are the requests that it covers."""
        with self._lock:
            one = self._replicas.get(replica)
            if one is not None:
                one.report, one.present, one.suspect_until = load, None, float("-inf")
                oldest = self._clock() - FORGET_S
                for call in [*received, *(call for call, routed in one.routed.items() if routed.at < oldest)]:
                    one.routed.pop(call, None)
                    self._places.pop(call, None)

    def route(self, call: str, replica: str, hashes: Sequence[bytes], n_tokens: int) -> None:
        """Count a request as sent to a replica, and to no other."""
        with self._lock:
            before = self._replicas.get(self._places.pop(call, ""))
            if before is not None:
                before.routed.pop(call, None)
                before.present = None
            one = self._replicas.get(replica)
            if one is not None:
                one.routed[call] = Routed(hashes, n_tokens, self._clock())
                one.present = None
                self._places[call] = replica

    def place(self, call: str) -> str:
        """Replica that an unreported call was sent to; "" for none."""
        with self._lock:
            return self._places.get(call, "")

    def suspect(self, replica: str) -> None:
        """Put a silent replica last, until it reports or for SUSPECT_S."""
        with self._lock:
            one = self._replicas.get(replica)
            if one is not None:
                one.suspect_until = self._clock() + SUSPECT_S

    def load(self, replica: str) -> Load:
        """Load of a replica, with what was sent since its report."""
        with self._lock:
            return self._replicas[replica].load(self._clock())[0]

    def order(
        self, hashes: Sequence[bytes], n_tokens: int, among: Iterable[str] | None = None, avoid: Iterable[str] = ()
    ) -> list[str]:
        """Replicas by ascending cost of a request, without those to avoid."""
        with self._lock:
            now = self._clock()
            names = (self._replicas.keys() if among is None else self._replicas.keys() & set(among)) - set(avoid)
            left = [(name, self._replicas[name], *self._replicas[name].load(now)) for name in names]
        usual = _usual([load for _, _, load, _ in left])
        costs = []
        for name, one, load, standing in left:
            if load.row_s is None:
                cost = cost_s(hashes, n_tokens, load, *usual)
            else:
                cost = load.row_s * n_uncached(hashes, n_tokens, load.blocks) + standing
            costs.append((one.suspect_until > now, cost, one.preference, name))
        return [name for *_, name in sorted(costs)]


def _with_routed(load: Load, calls: Collection[Routed]) -> Load:
    if not calls:
        return load
    blocks = set[bytes]()
    n_tokens = 0
    for routed in calls:
        n_tokens += n_uncached(routed.hashes, routed.n_tokens, load.blocks | blocks)
        blocks.update(routed.hashes)
    return attrs.evolve(
        load,
        running=min(load.slots, load.running + len(calls)),
        waiting=load.waiting + max(0, load.running + len(calls) - load.slots),
        tokens=load.tokens + n_tokens,
        blocks=load.blocks | blocks,
    )


def _usual(loads: Sequence[Load]) -> tuple[float, float]:
    """Step times where none were measured: the medians of the others."""
    if all(load.row_s is not None for load in loads):
        return BASE_S, ROW_S
    known = [(load.base_s, load.row_s) for load in loads if load.base_s is not None and load.row_s is not None]
    if not known:
        return BASE_S, ROW_S
    return statistics.median(base for base, _ in known), statistics.median(row for _, row in known)

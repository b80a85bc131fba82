"""Division of layers or rows among nodes, by memory and speed."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Sequence

import attrs
import numpy as np

from llamacli.engine.cutting import StageGraph, cut, cut_points
from llamacli.engine.rows import divided_tensors, rows_of
from llamacli.errors import InvalidRequestError, StageError
from llamacli.graph import Graph
from llamacli.loaders import ModelFile
from llamacli.ops.embed import Embed
from llamacli.ops.exchange import Exchange
from llamacli.util.settings import SplitMode

_SAMPLE_BYTES = 32 << 20
_SAMPLE_S = 0.05


@attrs.frozen
class Node:
    """Machine of a pipeline.

    `free` are bytes of memory, `speed` the bytes a second that it reads.
    """

    name: str
    free: int
    speed: float


@attrs.frozen
class Division:
    """Division of a graph: places to cut at, or shares of rows."""

    mode: SplitMode
    numbers: tuple[int, ...]

    def part(self, graph: Graph, number: int, exchange: Exchange) -> StageGraph:
        """Graph of a node, of which the caller is 0.

        Raises StageError for a number beyond the nodes.
        """
        n_nodes = len(self.numbers) + (self.mode is SplitMode.LAYER)
        if not 0 <= number < n_nodes:
            raise StageError(f"node {number} is none of {n_nodes}")
        if self.mode is SplitMode.LAYER:
            return cut(graph, self.numbers)[number]
        return rows_of(graph, self.numbers, number, exchange)

    def __str__(self) -> str:
        return f"{self.mode.value} {list(self.numbers)}"


@attrs.frozen
class Piece:
    """Ops that are not cut, such as those of a layer.

    They begin at `place`. `n_bytes` are those in memory, `n_read` those that a token reads.
    """

    place: int
    n_bytes: int
    n_read: int


def pieces_of(graph: Graph, file: ModelFile) -> list[Piece]:
    """Pieces of a graph, from its first op on."""
    pieces = []
    for start, stop in itertools.pairwise([0, *cut_points(graph), len(graph.ops)]):
        ops = graph.ops[start:stop]
        stored = {tensor.name for op in ops for tensor in op.tensors()}
        read = {tensor.name for op in ops if not isinstance(op, Embed) for tensor in op.tensors()}
        sizes = [sum(file.tensors[name].n_bytes for name in names) for names in (stored, read)]
        pieces.append(Piece(start, *sizes))
    return pieces


def divide(pieces: Sequence[Piece], nodes: Sequence[Node], shares: Sequence[float] | None = None) -> list[int]:
    """Places to cut at, for the least time of the slowest node.

    With `shares`, the time of each node is to be in proportion to these instead, whatever is free. Raises
    InvalidRequestError if there are fewer pieces than nodes, or no division fits into what is free.
    """
    n, m = len(pieces), len(nodes)
    if n < m:
        raise InvalidRequestError(f"the model can be cut into {n} stages at most, and there are {m} nodes")
    speeds = [node.speed for node in nodes] if shares is None else list(shares)
    stored, read = (
        [0, *itertools.accumulate(getattr(piece, name) for piece in pieces)] for name in ("n_bytes", "n_read")
    )

    @functools.cache
    def best(first: int, node: int) -> tuple[float, tuple[int, ...]]:
        """Time of the slowest node from this on, and first pieces."""
        found: tuple[float, tuple[int, ...]] = math.inf, ()
        stops = [n] if node == m - 1 else range(first + 1, n - (m - node - 1) + 1)
        for stop in stops:
            if shares is None and stored[stop] - stored[first] > nodes[node].free:
                break
            own = (read[stop] - read[first]) / speeds[node]
            rest, places = best(stop, node + 1) if stop < n else (0.0, ())
            if max(own, rest) < found[0]:
                found = max(own, rest), (first, *places)
        return found

    slowest, firsts = best(0, 0)
    if slowest == math.inf:
        free = ", ".join(f"{node.name} {node.free}" for node in nodes)
        raise InvalidRequestError(f"the weights, {stored[-1]} bytes, cannot be divided among what is free: {free}")
    return [pieces[first].place for first in firsts[1:]]


def shares_of(graph: Graph, file: ModelFile, nodes: Sequence[Node], shares: Sequence[float] | None = None) -> list[int]:
    """Shares of rows, for nodes that are done at the same time.

    They are thousandths. A node with too little memory gets as many as fit. With `shares`, they are in proportion to
    these instead, whatever is free. Raises InvalidRequestError if no division fits.
    """
    parts = {tensor.name for tensor in divided_tensors(graph, len(nodes))}
    tables = {tensor.name for op in graph.ops if isinstance(op, Embed) for tensor in op.tensors()}
    whole = {tensor.name for op in graph.ops for tensor in op.tensors()} - parts - tables
    divided, copied, looked_up = (sum(file.tensors[name].n_bytes for name in names) for names in (parts, whole, tables))
    if shares is None:
        room = [
            max(0.0, node.free - copied - (0 if i else looked_up)) / max(1, divided) for i, node in enumerate(nodes)
        ]
        if sum(room) < 1:
            free = ", ".join(f"{node.name} {node.free}" for node in nodes)
            raise InvalidRequestError(
                f"the weights, {divided} bytes, {copied} on each node and {looked_up} here, cannot be divided among "
                f"what is free: {free}"
            )
        shares = _filled([node.speed for node in nodes], room)
    return [max(1, round(1000 * share / sum(shares))) for share in shares]


def _filled(speeds: Sequence[float], room: Sequence[float]) -> list[float]:
    """Shares in proportion to speeds, none larger than its room."""
    full: set[int] = set()
    while True:
        left = 1 - sum(room[i] for i in full)
        others = sum(speed for i, speed in enumerate(speeds) if i not in full)
        found = [room[i] if i in full else left * speed / others for i, speed in enumerate(speeds)]
        over = {i for i, share in enumerate(found) if share > room[i]}
        if not over:
            return found
        full |= over


def read_speed(n_threads: int) -> float:
    """Measure how many bytes a second several threads read from memory."""
    blocks = [np.ones(_SAMPLE_BYTES // 8) for _ in range(n_threads)]
    n_read = [0] * n_threads
    stop = time.perf_counter() + _SAMPLE_S

    def read(i: int) -> None:
        while time.perf_counter() < stop:
            blocks[i].sum()
            n_read[i] += _SAMPLE_BYTES

    threads = [threading.Thread(target=read, args=(i,)) for i in range(n_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(1.0, sum(n_read) / (time.perf_counter() - started))

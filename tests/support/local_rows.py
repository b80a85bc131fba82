"""Nodes that divide the rows of products, in this process."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from llamacli.engine import Engine, QuantMode
from llamacli.engine.rows import RowsProgram, rows_of
from llamacli.engine.stages import StageBatch, StageRunner
from llamacli.graph import Graph
from llamacli.loaders import ModelFile


class LocalNodes:
    """Nodes on threads of their own; counts exchanges."""

    def __init__(self, n: int):
        self.runners: list[StageRunner] = []
        self._parts: list[Any] = [None] * n
        self._barrier, self._threads = threading.Barrier(n, timeout=60), [ThreadPoolExecutor(1) for _ in range(n)]
        self._running: list[Future[Any]] = []
        self.n_exchanges = 0

    def exchange(self, number: int, own: np.ndarray, widths: Sequence[int], *, to_first: bool) -> Sequence[np.ndarray]:
        assert own.shape[1] == widths[number]
        self._parts[number] = np.array(own)
        self._barrier.wait()
        self.n_exchanges += not number
        found = [*self._parts]
        self._barrier.wait()
        return [] if to_first and number else found

    def begin(self, batch: StageBatch) -> None:
        self.end()
        received = np.empty((len(batch.tokens), 0), np.float32)
        self._running = [
            thread.submit(runner.run, batch, received)
            for thread, runner in zip(self._threads, self.runners, strict=False)
        ]

    def end(self) -> None:
        for future in self._running:
            future.result()

    def fail(self, error: Exception) -> None:
        self._barrier.abort()

    def interrupt(self) -> None:
        self._barrier.abort()

    def connect(self, stages: Sequence[Any]) -> None:
        raise AssertionError


class LocalRows(Engine):
    """Engine that divides products among as many nodes as `shares`.

    `engines` makes the engine of a node; native ones need different threads, as a team runs one program.
    """

    def __init__(self, engines: Callable[[int], Engine], shares: Sequence[int]):
        self.engines, self.shares = engines, shares

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> RowsProgram:
        n = len(self.shares)
        self.nodes = nodes = LocalNodes(n)
        parts = [rows_of(graph, self.shares, i, functools.partial(nodes.exchange, i)) for i in range(n)]
        first, *others = [self.engines(i).compile(part, file, mode) for i, part in enumerate(parts)]
        nodes.runners = [StageRunner(program) for program in others]
        return RowsProgram(parts[0], first, [], nodes)

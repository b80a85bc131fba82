"""Pipeline stages in this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from llamacli.engine import Engine, Program, QuantMode
from llamacli.engine.cutting import cut, cut_points
from llamacli.engine.stages import Stage, StageBatch, StagedProgram, StageRunner
from llamacli.graph import Graph
from llamacli.kernels.kv_types.types import KVType
from llamacli.loaders import ModelFile


class LocalStage(Stage):
    """Stage of a program, on a thread of its own."""

    is_lost = False

    def __init__(self, program: Program, name: str):
        self.runner, self.name, self._thread = StageRunner(program), name, ThreadPoolExecutor(1)

    def start(self, batch: StageBatch, received: np.ndarray) -> Future[list[np.ndarray]]:
        return self._thread.submit(self.runner.run, batch, received)

    def follow(self, kv_type: KVType, log: np.ndarray) -> None:
        self._thread.submit(self.runner.follow, kv_type, log).result()

    def close(self) -> None:
        self._thread.shutdown()


class LocalStages(Engine):
    """Engine that cuts a graph into stages, by default one a layer."""

    def __init__(self, engine: Callable[[], Engine], places: Sequence[int] | None = None):
        self.engine, self.places = engine, places

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> StagedProgram:
        places = cut_points(graph) if self.places is None else self.places
        graphs = cut(graph, places)
        first, *others = [self.engine().compile(part, file, mode) for part in graphs]
        return StagedProgram(graphs, first, [LocalStage(program, f"stage {i}") for i, program in enumerate(others, 1)])

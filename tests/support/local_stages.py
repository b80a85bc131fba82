"""Pipeline stages in this process, and results of a model to compare."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import numpy as np

from llamacli import Model
from llamacli.engine import Chunk, Engine, Program, QuantMode, evaluate
from llamacli.engine.cutting import cut, cut_points
from llamacli.engine.stages import Stage, StageBatch, StagedProgram, StageRunner
from llamacli.graph import Graph
from llamacli.kernels.kv_types.types import KVType
from llamacli.kv import KVSequence
from llamacli.loaders import ModelFile

TOKENS = [(7 * i + 3) % 90 for i in range(70)]


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


def results(model: Model) -> list[np.ndarray]:
    """Logits of a prompt, of single tokens, and of a fork."""
    found = []
    with model.create_session(n_ctx=200) as session:
        if model.program.has_encoder:
            session.eval(model.encoder_inputs([5, 6, 7, 8, 9]))
        found.append(session.eval(TOKENS[:40], all_logits=True))
        with session.fork() as other:
            found += [session.eval([token], all_logits=True) for token in TOKENS[40:44]]
            found += [other.eval(TOKENS[50:], all_logits=True), other.eval([3], all_logits=True)]
            found.append(session.eval(TOKENS[44:50], all_logits=True))
    return found


def embeddings(model: Model) -> np.ndarray:
    """Rows that pooling reads."""
    pool, tokens = model.kv_pool("f32"), np.array(TOKENS[:20], np.int32)
    with closing(KVSequence(pool, 64, model.program.rope_variant(64))) as sequence:
        return evaluate(model.program_with, [Chunk(sequence, tokens.tolist(), n_last=20)], hidden=True)[0]

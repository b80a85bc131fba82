"""Graphs of single verbs on an engine.

The input is the embedding; the output goes into a linear layer.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from llamacli import ArrayFile, Graph, QuantMode, Value
from llamacli.engine import Engine, Program, Span
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.inputs import Inputs
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.testing import formulas

N_VOCAB, WIDTH = 20, 64
TOKENS = [3, 11, 0, 19, 7, 7, 2, 16, 5, 1, 9, 14, 18, 4, 12, 8, 6, 10]

Params = Callable[..., Param]
Build = Callable[[Graph, Params, Value], Value]


def span(program: Program, n: int, seq_len: int | None = None) -> Span:
    """Room for n tokens at the start of a new sequence."""
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32", program.recurrent)), seq_len or n)
    sequence.reserve(0, n)
    return Span(sequence, 0, n)


def on_patches(
    engine: Engine,
    build: Callable[[Graph, Value], Value],
    rows: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    spans: tuple[tuple[int, int], ...] = (),
    weights: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Result on patches, float32 [n, width], at positions, int32 [n, 4]."""
    graph, (n, width) = Graph(), rows.shape
    build(graph, graph.patches(width))
    graph.n_batch = n
    program = engine.compile(graph, ArrayFile(Path("none"), Metadata({}, "none"), dict(weights or {})), QuantMode.FP32)
    places = np.zeros((n, 4), np.int32) if positions is None else positions
    inputs = Inputs(np.zeros(n, np.int32), [0] * n, rows, np.arange(n), places, spans)
    given = attrs.evolve(span(program, n), inputs=inputs)
    return program.forward(inputs.ids, [given], [n // graph.n_merged])


class Run:
    """A graph, its random weights by name, and the embedded tokens."""

    def __init__(
        self,
        engine: Engine,
        build: Build,
        tokens: Sequence[int] = TOKENS,
        mode: str = "fp32",
        seq_len: int | None = None,
        output: bool = True,
    ):
        random = np.random.default_rng(5)
        self.arrays: dict[str, np.ndarray] = {}

        def param(name: str, *shape: int, bias: bool = False) -> Param:
            def tensor(kind: str, shape: tuple[int, ...]) -> Tensor:
                self.arrays[f"{name}.{kind}"] = random.normal(0, 0.3, shape).astype(np.float32)
                return Tensor(f"{name}.{kind}", shape)

            return Param(tensor("weight", shape), tensor("bias", shape[:-1] or shape) if bias else None)

        graph = Graph()
        x = graph.embed(param("token_embd", N_VOCAB, WIDTH))
        out = build(graph, param, x)
        if output:
            graph.linear(out, param("output", 32, out.width))
        self.program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), self.arrays), QuantMode(mode))
        spans = [span(self.program, len(tokens), seq_len)]
        self.logits = self.program.forward(np.array(tokens, np.int32), spans, [len(tokens)])
        self.tokens = list(tokens)
        self.x = self["token_embd"][self.tokens].astype(np.float64)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name if name.endswith("bias") else f"{name}.weight"].astype(np.float64)

    def check(self, expected: np.ndarray, bound: float = 1e-12) -> None:
        """`expected` is what goes into the last linear layer."""
        assert formulas.nmse(self.logits, formulas.linear(expected, self["output"])) < bound

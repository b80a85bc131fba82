"""Heads that read hidden states, computed in NumPy: classifiers, dense layers."""

from __future__ import annotations

from typing import Any, Self, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import QuantMode
from llamacli.engine.reference import ReferenceEngine, ReferenceProgram
from llamacli.graph import Graph
from llamacli.loaders import ModelFile
from llamacli.ops.run import Span


@attrs.frozen
class Dense:
    """Layers behind hidden states, such as those of embeddings."""

    program: ReferenceProgram

    @classmethod
    def load(cls, graph: Graph, file: ModelFile, **options: Any) -> Self:
        """Load the weights of a recorded head.

        They are the file's own numbers, whatever the mode of the model is.
        """
        return cls(ReferenceEngine().compile(graph, file, QuantMode.FP32), **options)

    @property
    def width(self) -> int:
        """Numbers of a result."""
        return self.program.graph.ops[-1].out.width

    def apply(self, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Results for hidden states, float32 [n, width]."""
        n = len(states)
        span = Span(cast("Any", None), 0, n, hidden=states)  # no op of a head reads a cache
        return self.program.forward(np.zeros(n, np.int32), [span], [n])


@attrs.frozen
class Classifier(Dense):
    """Classifier head of a model; `softmax` normalises its scores."""

    softmax: bool

    def scores(self, state: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of the classes, float32 [n_classes].

        `state` is a pooled hidden state, float32 [n_embd].
        """
        scores = self.apply(state[None])[0]
        if self.softmax:
            powers = np.exp(scores.astype(np.float64) - scores.max())
            scores = (powers / powers.sum()).astype(np.float32)
        return scores

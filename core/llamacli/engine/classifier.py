"""Classifier heads, computed in NumPy: one row a text."""

from __future__ import annotations

from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import QuantMode
from llamacli.engine.reference import ReferenceEngine, ReferenceProgram
from llamacli.graph import Graph
from llamacli.loaders import ModelFile
from llamacli.ops.run import Span


@attrs.frozen
class Classifier:
    """Classifier head of a model; `softmax` normalises its scores."""

    program: ReferenceProgram
    softmax: bool

    @classmethod
    def load(cls, graph: Graph, file: ModelFile, *, softmax: bool) -> Classifier:
        """Load the weights of a recorded head.

        They are the file's own numbers, whatever the mode of the model is.
        """
        return cls(ReferenceEngine().compile(graph, file, QuantMode.FP32), softmax)

    def scores(self, state: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of the classes, float32 [n_classes].

        `state` is a pooled hidden state, float32 [n_embd].
        """
        span = Span(cast("Any", None), 0, 1, hidden=state[None])  # no op of a head reads a cache
        scores = self.program.forward(np.zeros(1, np.int32), [span], [1])[0]
        if self.softmax:
            powers = np.exp(scores.astype(np.float64) - scores.max())
            scores = (powers / powers.sum()).astype(np.float32)
        return scores

"""The interface between a recorded graph and whatever computes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamacli.graph import AttentionState, Graph
from llamacli.kv import KVCache
from llamacli.loaders import ModelFile


class QuantMode(enum.StrEnum):
    """How weights are kept: `auto` in the file's own types, `fp32` exact, `q8` and `q4` requantised at load."""

    AUTO = "auto"
    FP32 = "fp32"
    Q8 = "q8"
    Q4 = "q4"


class Program(Protocol):
    """A graph bound to a model's weights. Read-only: any number of caches may be run through it."""

    @property
    def states(self) -> Sequence[AttentionState]:
        """What each attention layer keeps; a KVCache is made from this."""

    def forward(
        self, tokens: npt.NDArray[np.int32], n_past: int, cache: KVCache, *, all_logits: bool
    ) -> npt.NDArray[np.float32]:
        """Evaluate `tokens`, int32 [n], at positions n_past onwards, writing their keys and values to `cache`.

        Returns new float32 [n, n_vocab] with `all_logits`, else [1, n_vocab], the last token's. A token's logits do not
        depend on which tokens are evaluated in the same call. Bounds are the caller's to check.
        """


class Engine(Protocol):
    """Compiles graphs."""

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        """Bind a graph to the weights of `file`, kept as `mode` says; the file may be closed afterwards."""

"""The interface between a recorded graph and whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.graph import Graph
from llamacli.kv.layout import KVSpec
from llamacli.loaders import ModelFile
from llamacli.ops.run import Span
from llamacli.util.settings import QuantMode as QuantMode


@attrs.define(eq=False)
class Timings:
    """Seconds that a program has spent: in `total`, and in ops without kernels, by the op's description."""

    total: float = 0.0
    host: dict[str, float] = attrs.field(factory=dict)

    def shares(self) -> dict[str, float]:
        """Share of the time that each op without a kernel took, from 0 to 1."""
        return {op: seconds / self.total for op, seconds in self.host.items()} if self.total else {}


class Program(Protocol):
    """A graph bound to a model's weights. Read-only: any number of sequences may be run through it."""

    timings: Timings

    @property
    def states(self) -> Sequence[KVSpec]:
        """Shapes of the keys and values of each attention layer, from which the layout of a KV cache follows."""

    @property
    def max_positions(self) -> int | None:
        """Longest context that can be computed, None for any."""

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], *, all_logits: bool
    ) -> npt.NDArray[np.float32]:
        """Evaluate `tokens`, int32 [n], which `spans` share out in order, writing their keys and values.

        Returns new float32 [n, n_vocab] with `all_logits`, else [len(spans), n_vocab], of the last token of each span.
        A token's logits do not depend on which tokens are evaluated in the same call. The caller has checked bounds,
        reserved the cells and lets no sequence occur twice.
        """

    def shift_keys(self, layer: int, keys: npt.NDArray[np.float32], by: int, seq_len: int) -> npt.NDArray[np.float32]:
        """Keys of state `layer`, float32 [n_head_kv, head_dim, n], as they would be at positions `by` lower.

        `seq_len` is the context of their sequence. Raises InvalidRequestError if they cannot be moved.
        """

    def rope_variant(self, seq_len: int) -> int:
        """What `seq_len` changes in what is computed: sequences of different RoPE variants cannot share cells."""


class Engine(Protocol):
    """Compiles graphs."""

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        """Bind a graph to the weights of `file`, kept as `mode` says; the file may be closed afterwards."""


def expect_finite(finite: bool, tensor: str, file: ModelFile) -> None:
    """Refuse a tensor that is not: rounding activations loses NaN, and what came out would look like an answer."""
    if not finite:
        raise ModelFormatError(f"{file.path}: tensor {tensor!r} has weights that are NaN, infinite or too large")

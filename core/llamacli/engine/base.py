"""The interface between a recorded graph and whatever computes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.graph import Graph
from llamacli.kv import KVSequence
from llamacli.kv.layout import KVSpec
from llamacli.loaders import ModelFile


class QuantMode(enum.StrEnum):
    """How weights are kept: `auto` in the file's own types, `fp32` exact, `q8` and `q4` requantised at load."""

    AUTO = "auto"
    FP32 = "fp32"
    Q8 = "q8"
    Q4 = "q4"


@attrs.frozen(eq=False)
class Span:
    """`n` tokens of a batch that follow one another in `sequence`, from cell and position `start` on."""

    sequence: KVSequence
    start: int
    n: int


class Program(Protocol):
    """A graph bound to a model's weights. Read-only: any number of sequences may be run through it."""

    @property
    def states(self) -> Sequence[KVSpec]:
        """What each attention layer keeps; the layout of a KV cache follows from this."""

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], *, all_logits: bool
    ) -> npt.NDArray[np.float32]:
        """Evaluate `tokens`, int32 [n], which `spans` share out in order, writing their keys and values.

        Returns new float32 [n, n_vocab] with `all_logits`, else [len(spans), n_vocab], of the last token of each span.
        A token's logits do not depend on which tokens are evaluated in the same call. The caller has checked bounds,
        reserved the cells and lets no sequence occur twice.
        """

    def shift_keys(self, layer: int, keys: npt.NDArray[np.float32], by: int, seq_len: int) -> npt.NDArray[np.float32]:
        """Keys of state `layer`, float32 [n_head_kv, head_dim, n], as they are at positions `by` lower.

        `seq_len` is what their sequence was made for. Raises InvalidRequestError if they cannot be turned on their own.
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

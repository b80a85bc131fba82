"""Engine interface: compile a graph to a program, run the program."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError
from llamacli.graph import Graph, Tensor
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.loaders import ModelFile
from llamacli.ops.run import Span
from llamacli.util.settings import Prompts as Prompts
from llamacli.util.settings import QuantMode as QuantMode


@attrs.define(eq=False)
class Timings:
    """Time that a program has spent, in seconds.

    `total`, and `host`: the part in ops without kernels, by the op's description. `batch_share`: how much of a batch
    under way is done, 0 to 1; 0 for short ones. Other threads may read it.
    """

    total: float = 0.0
    host: dict[str, float] = attrs.field(factory=dict)
    batch_share: float = 0.0

    def shares(self) -> dict[str, float]:
        """Share of time of each op without a kernel, 0 to 1."""
        return {op: seconds / self.total for op, seconds in self.host.items()} if self.total else {}


class Program(Protocol):
    """Compiled graph bound to a model's weights.

    Read-only: any number of sequences may be run through it.
    """

    timings: Timings

    @property
    def graph(self) -> Graph:
        """Graph that was compiled."""

    @property
    def is_whole(self) -> bool:
        """False once its weights are lost, as in a changed file."""

    def load(self, tensors: Iterable[Tensor], file: ModelFile) -> Mapping[Tensor, Any]:
        """Load further matrices, exactly in a program of mode fp32.

        Returns them as `recompiled` takes them; the file may be closed afterwards. Raises ModelFormatError for numbers
        that are not finite.
        """

    def recompiled(self, graph: Graph, matrices: Mapping[Tensor, Any]) -> Program:
        """Compile another graph of the same weights and of further matrices."""

    def extended(self, graph: Graph, file: ModelFile) -> Program:
        """Compile another graph of the model's file.

        Its tensors are the same weights and further ones, such as those of a multi-token-prediction head. The file may
        be closed afterwards. Raises ModelFormatError for numbers that are not finite.
        """

    @property
    def states(self) -> Sequence[KVSpec]:
        """KV cache shapes of the attention layers.

        The layout of a KV cache follows from them.
        """

    @property
    def recurrent(self) -> Sequence[RecurrentSpec]:
        """Shapes of the recurrent states of a sequence."""

    @property
    def max_positions(self) -> int | None:
        """Longest context that can be computed, None for any."""

    @property
    def needs_whole_input(self) -> bool:
        """True if a token's result depends on tokens behind it."""

    @property
    def prompts(self) -> Prompts:
        """Way of the tokens of prompts; see `Span.is_prompt`."""

    @property
    def has_encoder(self) -> bool:
        """True if a context begins with a text for an encoder."""

    @property
    def has_hidden(self) -> bool:
        """True if `forward` can return hidden states."""

    def forward(
        self,
        tokens: npt.NDArray[np.int32],
        spans: Sequence[Span],
        n_last: Sequence[int],
        *,
        hidden: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Run a batch of tokens and write their keys and values.

        `tokens` is int32 [n]; `spans` divide it among sequences, in order. Returns new float32 [sum(n_last), n_vocab],
        of the last `n_last` tokens of each span, which may be 0; of a media encoder, of the last merged rows. With
        `hidden`, the rows are those that the output layer reads, [.., n_embd]. A token's logits do not depend on which
        tokens are evaluated in the same call. The caller has checked bounds, reserved the cells and lets no sequence
        occur twice. An encoder's text is in batches of its own, without rows.
        """

    def forward_in_pieces(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> Generator[None, None, npt.NDArray[np.float32]]:
        """Run a media encoder's batch as `forward`, in short pieces.

        Yields after each piece; the rows are the generator's return value, bit for bit those of `forward`. Until it has
        ended or is closed, nothing else may run this program.
        """

    def forward_with_hidden(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Run a batch as `forward` does, and return the hidden states too.

        Returns the logits of the last `n_last` tokens of each span, float32 [sum(n_last), n_vocab], bit for bit those
        of `forward`, and of all tokens the value that the graph passes, by default the rows that the output layer
        reads, float32 [n, n_embd]. Only where `has_hidden`.
        """

    def shift_keys(self, layer: int, keys: npt.NDArray[np.float32], by: int, seq_len: int) -> npt.NDArray[np.float32]:
        """Shift cached keys to positions `by` lower (K-shift).

        `keys` are those of state `layer`, float32 [n_head_kv, head_dim, n]; so is the result. `seq_len` is the context
        length of their sequence. Raises InvalidRequestError if they cannot be shifted.
        """

    def rope_variant(self, seq_len: int) -> int:
        """RoPE variant that a context of this length uses.

        Sequences of different variants cannot share cells.
        """


def wanted_rows(spans: Sequence[Span], n_last: Sequence[int], n_merged: int = 1) -> npt.NDArray[np.intp]:
    """Rows of a batch whose results `Program.forward` returns, ascending.

    Each is the last of `n_merged` rows, of which one result is made.
    """
    rows: list[int] = []
    stop = 0
    for span, n in zip(spans, n_last, strict=True):
        stop += span.n
        rows += range(stop - n * n_merged + n_merged - 1, stop, n_merged)
    return np.array(rows, np.intp)


class Engine(Protocol):
    """Compiler of graphs."""

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        """Compile a graph with the weights of a file.

        Weights are kept as `mode` says; the file may be closed afterwards.
        """


def expect_finite(finite: bool, tensor: str, file: ModelFile) -> None:
    """Raise ModelFormatError for a tensor that is not finite.

    Rounding activations loses NaN, so that wrong results would look valid.
    """
    if not finite:
        raise ModelFormatError(f"{file.path}: tensor {tensor!r} has weights that are NaN, infinite or too large")

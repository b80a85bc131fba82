"""Importance matrix of a model (imatrix), collected by llama.cpp's method.

The tokens are split into chunks of `n_ctx`, without an incomplete last one. Each chunk is evaluated by itself, its
first token replaced by BOS if the model uses it, and the squares of every input of each matrix product are summed: for
stacks of experts by expert. Matrices outside of layers (the output matrix) are left out unless they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamacli.conversion import Importance, ImportanceMatrix
from llamacli.errors import InvalidRequestError
from llamacli.gguf import TensorInfo
from llamacli.graph import Tensor
from llamacli.model import Model
from llamacli.util.numbers import is_integer

MIN_CONTEXT = 16
"""Fewest tokens of a chunk: llama.cpp does not count products of fewer rows."""

Rows = npt.NDArray[np.float32]


class Collector:
    """Sums of squared inputs by tensor, an engine's `llamacli.engine.lowering.Watch`."""

    def __init__(self, *, output: bool = False):
        self._output = output
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._counts: dict[str, npt.NDArray[np.int64]] = {}

    def __call__(self, tensor: Tensor, x: Rows, starts: npt.NDArray[np.int64] | None) -> None:
        """Add the squares of rows, float32 [n, n_in].

        With `starts` they are sorted by matrix. Of the parts of a fused tensor, which have the same input, the first
        counts.
        """
        name = tensor.name
        if tensor.first_row or not (name.startswith("blk.") or (self._output and name == "output.weight")):
            return
        n_in = tensor.shape[-1]
        if starts is not None:
            sums, counts = self._of(name, tensor.shape[0], n_in, tensor.shape[0])
            for i in np.flatnonzero(np.diff(starts)).tolist():
                sums[i] += _squares(x[starts[i] : starts[i + 1]])
            counts += np.diff(starts)
        else:
            # A stack without `starts` has a matrix for each head of the input, whose padding is left out.
            n_heads = math.prod(tensor.shape[:-2])
            sums, counts = self._of(name, n_heads, n_in, 1)
            sums += _squares(x).reshape(n_heads, -1)[:, :n_in]
            counts += len(x)

    def _of(
        self, name: str, n_matrices: int, n_in: int, n_counts: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        if name not in self._sums:
            self._sums[name], self._counts[name] = np.zeros((n_matrices, n_in)), np.zeros(n_counts, np.int64)
        return self._sums[name], self._counts[name]

    def entries(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Importance]:
        """Entries of a file's tensors, without products of other shapes."""
        return {
            name: Importance(
                sums.astype(np.float32).reshape(len(self._counts[name]), -1), self._counts[name].astype(np.float32)
            )
            for name, sums in self._sums.items()
            if sums.size == math.prod(tensors[name].shape[:-2]) * tensors[name].shape[-1]
        }


def _squares(x: Rows) -> Rows:
    return np.einsum("ij,ij->j", x, x)


def collect(model: Model, tokens: Sequence[int], *, n_ctx: int = 512, max_chunks: int | None = None) -> Iterator[int]:
    """Evaluate a text in chunks; yields the number of chunks done.

    The model is one whose engine has a Collector. Raises InvalidRequestError if the tokens do not fill a chunk, or
    `n_ctx` is less than MIN_CONTEXT.
    """
    if not is_integer(n_ctx) or n_ctx < MIN_CONTEXT:
        raise InvalidRequestError(f"n_ctx must be an integer of at least {MIN_CONTEXT}, not {n_ctx!r}")
    if len(tokens) < n_ctx:
        raise InvalidRequestError(
            f"the text has {len(tokens)} tokens, and a chunk has {n_ctx}: use a longer text or a smaller context"
        )
    return _evaluated(model, tokens, n_ctx, number_of_chunks(tokens, n_ctx, max_chunks))


def number_of_chunks(tokens: Sequence[int], n_ctx: int, max_chunks: int | None = None) -> int:
    """Number of chunks that are evaluated."""
    n_chunks = len(tokens) // n_ctx
    return n_chunks if max_chunks is None else min(max_chunks, n_chunks)


def chunks_of(model: Model, tokens: Sequence[int], n_ctx: int, n_chunks: int) -> Iterator[list[int]]:
    """Chunks of `n_ctx` tokens, with BOS if the model uses it."""
    for start in range(0, n_chunks * n_ctx, n_ctx):
        ids = list(tokens[start : start + n_ctx])
        if model.tokenizer.add_bos and model.tokenizer.bos_id is not None:
            ids[0] = model.tokenizer.bos_id
        yield ids


def _evaluated(model: Model, tokens: Sequence[int], n_ctx: int, n_chunks: int) -> Iterator[int]:
    with model.create_session(n_ctx=n_ctx, reuse=False) as session:
        for done, ids in enumerate(chunks_of(model, tokens, n_ctx, n_chunks), start=1):
            session.rewind(0)
            session.eval(ids, all_logits=True)
            yield done


def importance_matrix(
    path: Path, collector: Collector, tensors: Mapping[str, TensorInfo], *, dataset: str, n_chunks: int, n_ctx: int
) -> ImportanceMatrix:
    """Importance matrix of a Collector; InvalidRequestError names a tensor not finite."""
    entries = collector.entries(tensors)
    for name, entry in entries.items():
        if not np.isfinite(entry.sums).all():
            raise InvalidRequestError(f"the inputs of {name!r} are not finite: the model cannot be measured")
    return ImportanceMatrix(path, entries, [dataset], n_chunks, n_ctx)

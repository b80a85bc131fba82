"""Embedding lookup: out = table[token]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy.typing as npt

from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.scale import scale
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class Embed(Op):
    """out = table[token], rows of a matrix (n_vocab, n_embd)."""

    table: Tensor

    def matrices(self) -> list[Tensor]:
        """See Op."""
        return [self.table]

    def compute(self, run: Run) -> Array:
        """See Op."""
        return run[self.table][run.tokens]

    def lower(self, to: Lowering) -> None:
        """See Op.

        Rows of the packed table are unpacked in Python: there are only as many as tokens.
        """
        matrix, out = to.matrix(self.table), f32(self.out)

        def look_up(rows: HostRows, at: Callable[[Slot], npt.NDArray[Any]]) -> None:
            at(out)[rows.first : rows.stop, : out.width] = matrix.rows(rows.tokens)

        to.host_step(look_up, [], [out])


def embed(g: Recorder, table: Param) -> Value:
    """Embed each token: rows of a table.

    Formula: `out = table[token] * scale`, the scale where the file has one
    Shapes: table (n_vocab, n_embd); out [n, n_embd]
    Limits: every token is below n_vocab
    Example: `x = g.embed(weights.token_embd)`
    """
    expect("embed", len(table.weight.shape) == 2, f"{table.weight.name} {table.weight.shape} and rows a token")
    out = g.record(Embed(g.value(table.weight.shape[1]), table.weight))
    return scale(g, out, Param(table.scale)) if table.scale else out

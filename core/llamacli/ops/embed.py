"""Embedding lookup: out = table[token]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy.typing as npt

from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.linear import lower_scaled, product
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.scale import scale
from llamacli.ops.values import Adapt, Array, LowRank, LowRanks, Param, Tensor, Value


@attrs.frozen(eq=False)
class Embed(Op):
    """out = table[token], rows of a matrix (n_vocab, n_embd), which has low-rank changes."""

    table: Tensor
    changes: LowRanks = ()

    def matrices(self) -> list[Tensor]:
        """See Op."""
        return [self.table, *(tensor for change in self.changes for tensor in (change.a, change.b))]

    def adapted(self, adapt: Adapt) -> Embed:
        """See Op."""
        return attrs.evolve(self, changes=self.changes + adapt(self.table))

    def compute(self, run: Run) -> Array:
        """See Op."""
        out = run[self.table][run.tokens]
        for change in self.changes:
            out = out + change.scale * product(run[change.a][run.tokens], run[change.b])
        return out

    def lower(self, to: Lowering) -> None:
        """See Op.

        Rows of the packed table are unpacked in Python: there are only as many as tokens.
        """
        out = f32(self.out)
        _look_up(to, self.table, out)
        for change in self.changes:
            narrow = Slot((self, change.a), "f32", change.a.shape[-1])
            _look_up(to, change.a, narrow)
            lower_scaled(to, narrow, change, out)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        (made,) = (op for op in g.ops if op.out is x and isinstance(op, Embed))
        table, (n_vocab, width) = made.table, made.table.shape
        change = LowRank(param("a", n_vocab, 3).weight, param("b", width, 3).weight, 0.5)
        yield g.record(Embed(g.value(width), table, (change, change)))


def _look_up(to: Lowering, table: Tensor, out: Slot) -> None:
    """Append the step that writes each token's row of a table."""
    matrix = to.matrix(table)

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

"""Embedding lookup: out = table[token]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.base import LARGEST, MakeParam, Op, Recorder, expect, expect_number
from llamacli.ops.linear import lower_scaled, product
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.scale import scale as multiply
from llamacli.ops.values import Adapt, Array, LowRank, LowRanks, Param, Tensor, Value


@attrs.frozen(eq=False)
class Embed(Op):
    """out = table[token] * scale, rows of a matrix (n_vocab, n_embd).

    `changes` are low-rank changes of the matrix. Embeddings given as inputs are `out` as they are; with a
    `placeholder`, they are looked up as that id. `substitutes` are pairs of an id and the one looked up for it.
    """

    table: Tensor
    scale: float = 1.0
    placeholder: int | None = None
    changes: LowRanks = ()
    substitutes: tuple[tuple[int, int], ...] = ()

    def matrices(self) -> list[Tensor]:
        return [self.table, *(tensor for change in self.changes for tensor in (change.a, change.b))]

    def adapted(self, adapt: Adapt) -> Embed:
        return attrs.evolve(self, changes=self.changes + adapt(self.table))

    def compute(self, run: Run) -> Array:
        inputs, tokens = run.span.inputs, self._ids()[run.tokens] if self.substitutes else run.tokens.copy()
        if inputs is not None:
            tokens[inputs.rows] = self.placeholder or 0
        out = run[self.table][tokens]
        for change in self.changes:
            out = out + run.scale_of(change) * product(run[change.a][tokens], run[change.b])
        out = self.scale * out
        if inputs is not None and inputs.embeddings is not None and self.placeholder is None:
            out[inputs.rows] = inputs.embeddings[:, : self.out.width]  # the rest is that of deepstack
        return out

    def lower(self, to: Lowering) -> None:
        out = f32(self.out)
        self._look_up(to, self.table, out)
        for change in self.changes:
            narrow = Slot((self, change.a), "f32", change.a.shape[-1])
            self._look_up(to, change.a, narrow)
            lower_scaled(to, narrow, attrs.evolve(change, ratio=change.ratio * self.scale), out)

    def _look_up(self, to: Lowering, table: Tensor, out: Slot) -> None:
        """Append the step that writes each token's row of a table.

        It is the op's, or A of a change, whose rows are zeros for embeddings given as inputs.
        """
        from llamacli.kernels.embedding import EMBED, embedding

        matrix, is_table = to.matrix(table), table is self.table
        ids = to.shared((self, "ids"), lambda: to.memory(self._ids())) if self.substitutes else None
        to.step(
            embedding(matrix.kind), EMBED, weight=matrix.packed, tile_bytes=matrix.packed[0, 0].nbytes,
            n_blocks=matrix.packed.shape[2], out=out, width=out.width,
            placeholder=-1 if self.placeholder is None else self.placeholder,
            copies=is_table and self.placeholder is None, scale=self.scale if is_table else 1, ids=ids,
            work_unit=out.width,
        )  # fmt: skip

    def _ids(self) -> npt.NDArray[np.int32]:
        """Id that is looked up for each token."""
        ids = np.arange(self.table.shape[0], dtype=np.int32)
        for token, substitute in self.substitutes:
            ids[token] = substitute
        return ids

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        (made,) = (op for op in g.ops if op.out is x and isinstance(op, Embed))
        table, (n_vocab, width) = made.table, made.table.shape
        change = LowRank(param("a", n_vocab, 3).weight, param("b", width, 3).weight, 0.5)
        yield g.record(Embed(g.value(width), table, changes=(change, change)))
        yield g.record(Embed(g.value(width), table, 2.5))
        yield g.record(Embed(g.value(width), table, placeholder=0))
        yield g.record(Embed(g.value(width), table, substitutes=tuple((i, n_vocab - 1 - i) for i in range(n_vocab))))


def embed(
    g: Recorder,
    table: Param,
    scale: float = 1.0,
    placeholder: int | None = None,
    substitutes: Mapping[int, int] | None = None,
) -> Value:
    """Embed each token: rows of a table.

    A prompt may give embeddings in the place of ids (`llamacli.Inputs`): these are the result as they are, without
    `scale`. A further table, such as per-layer embeddings, has a `placeholder`: the id that is looked up for them.
    `substitutes` are ids by the tokens in whose place they are looked up.

    Formula: `out = table[token] * scale`, times the scale of the file where it has one
    Shapes: table (n_vocab, n_embd); out [n, n_embd]
    Limits: every token is below n_vocab, and so are the placeholder and the substitutes
    Example: `x = g.embed(weights.token_embd)`
    """
    shape = table.weight.shape
    expect("embed", len(shape) == 2, f"{table.weight.name} {shape} and rows a token")
    expect(
        "embed", placeholder is None or 0 <= placeholder < shape[0], f"{table.weight.name} {shape}, row {placeholder}"
    )
    pairs = tuple((substitutes or {}).items())
    for token in (token for pair in pairs for token in pair):
        expect("embed", 0 <= token < shape[0], f"{table.weight.name} {shape} and a substitute, {token}")
    expect_number("embed", "scale", scale, -LARGEST, LARGEST)
    out = g.record(Embed(g.value(shape[1]), table.weight, float(scale), placeholder, (), pairs))
    return multiply(g, out, Param(table.scale)) if table.scale else out

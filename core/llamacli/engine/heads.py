"""Draft heads: programs that predict tokens from hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Program
from llamacli.engine.compiled_model import CompiledModel
from llamacli.kv import KVPool, KVSequence
from llamacli.ops.run import Span

Rows = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Head(contextlib.AbstractContextManager["Head"]):
    """Draft head of a model, in its own file or another.

    - `name`: that of messages; `model`: the model whose hidden states it reads.
    - `get_program`: returns `program`, which computes logits from tokens and states, and the states behind them: that
      of the model's own head is the model's, and is freed with it. `pool` has its caches.
    - `fuser`: makes a state of what the model passes, its `columns` side by side; None for hidden states as they are.
    - `ids`: ids of its tokens in the model's vocabulary, int64, None where they are the same.
    - `injector`: caches keys and values of states, in a head that predicts blocks; `block` is what
      `BlockHeadArchitecture.block` returns; `biases` computes what a token adds to the next one's logits, None nothing,
      of the `n_candidates` most probable tokens, None for all.
    - `reads_cache`: it has no cache, and reads the model's; `pool` is the model's then.
    """

    name: str
    model: CompiledModel
    get_program: Callable[[], Program]
    pool: KVPool
    fuser: Program | None = None
    columns: tuple[slice, ...] = ()
    ids: npt.NDArray[np.int64] | None = None
    injector: Program | None = None
    block: tuple[int, int, bool, int] = (0, 0, False, 1)
    biases: Program | None = None
    n_candidates: int | None = None
    reads_cache: bool = False

    @property
    def program(self) -> Program:
        """See the class; raises ClosedError for a model that is closed."""
        return self.get_program()

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return self.model.config.n_embd if self.fuser is None else self.fuser.graph.ops[-1].out.width

    @property
    def n_passed(self) -> int:
        """Numbers that the model passes of a token."""
        return self.model.config.n_embd * (1 + self.model.n_layer_inputs)

    def sequence(self, n_ctx: int | None) -> KVSequence:
        """New sequence of its cache, for `n_ctx` tokens.

        The default is the model's context.
        """
        n_ctx = self.model.context_size(n_ctx)
        return KVSequence(self.pool, n_ctx, self.program.rope_variant(n_ctx))

    def states(self, passed: Rows, sequence: KVSequence) -> Rows:
        """States of tokens, float32 [n, width].

        `passed` is what the model passes of them, float32 [n, n_passed].
        """
        if self.fuser is None:
            return passed[:, : self.width]
        features = np.concatenate([passed[:, columns] for columns in self.columns], 1)
        n = len(features)
        return self.fuser.forward(np.zeros(n, np.int32), [Span(sequence, 0, n, features)], [n])

    def logits(self, rows: Rows) -> Rows:
        """Logits of the model's tokens, float32 [n, n_vocab].

        They are -inf for tokens that the head does not have.
        """
        if self.ids is None:
            return rows
        found = np.full((len(rows), self.model.config.n_vocab), -np.inf, np.float32)
        found[:, self.ids] = rows
        return found

    def biased(self, row: Rows, hidden: Rows, token: int, sequence: KVSequence) -> Rows:
        """Logits of a row of a block behind a token, float32 [n_vocab].

        `hidden` is what the output layer has read of the row, float32 [n_embd].
        """
        if self.biases is None:
            return row
        bias = self.biases.forward(np.array([token], np.int32), [Span(sequence, 0, 1, hidden[None])], [1])
        biased = row + self.logits(bias)[-1]
        if self.n_candidates is None or self.n_candidates >= len(row):
            return biased
        candidates = np.argpartition(row, -self.n_candidates)[-self.n_candidates :]
        found = np.full_like(row, -np.inf)
        found[candidates] = biased[candidates]
        return found

    def close(self) -> None:
        """Do nothing: weights and caches are freed with the object."""

    def __exit__(self, *_: object) -> None:
        self.close()


def nextn_head(model: CompiledModel) -> Head:
    """Multi-token-prediction head of a model; raises what `CompiledModel.nextn_program` raises."""
    return Head("multi-token-prediction head", model, model.nextn_program, model.nextn_pool())

"""Evaluation of a step, with errors confined to their sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Program, evaluate
from llamacli.engine.batching import TakeHidden
from llamacli.kv import KVSequence

Rows = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Work:
    """Next tokens of a sequence, to be evaluated.

    Results of the `n_last` last ones are wanted. The sequence may be truncated by the `n_ahead` last ones afterwards.
    `keep` is called with checkpoints of recurrent states, which it may fork, `take_hidden` with hidden states.
    """

    sequence: KVSequence
    tokens: Sequence[int]
    n_last: int
    keep: Callable[[KVSequence], None] | None = None
    n_ahead: int = 0
    take_hidden: TakeHidden | None = None


def evaluate_each(program: Program, work: Sequence[Work], *, hidden: bool = False) -> list[Rows | Exception]:
    """Evaluate pieces of sequences in one pass.

    The results of each, float32 [n_last, n_vocab or n_embd]. If that fails, each piece is evaluated alone, and those
    that fail again give their error; their sequences are as they were.
    """
    try:
        return [*_evaluate(program, work, hidden)]
    except Exception as error:
        if len(work) == 1:
            return [error]
    results: list[Rows | Exception] = []
    for one in work:
        try:
            results += _evaluate(program, [one], hidden)
        except Exception as error:
            results.append(error)
    return results


def _evaluate(program: Program, work: Sequence[Work], hidden: bool) -> list[Rows]:
    pairs = [(one.sequence, np.array(one.tokens, np.int32)) for one in work]

    def checkpoint(i: int, sequence: KVSequence) -> None:
        keep = work[i].keep
        if keep is not None:
            keep(sequence)
        sequence.close()

    wanted = any(one.keep for one in work) and bool(work[0].sequence.pool.layout.recurrent)
    return evaluate(
        program,
        pairs,
        n_last=[one.n_last for one in work],
        hidden=hidden,
        checkpoint=checkpoint if wanted else None,
        n_ahead=[one.n_ahead for one in work],
        hidden_out=[one.take_hidden for one in work],
    )

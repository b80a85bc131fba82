"""Evaluation of a step, in which an error of one sequence spares the others."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Program, evaluate
from llamacli.kv import KVSequence

Rows = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Work:
    """Next tokens of a sequence, and of how many last ones results are wanted."""

    sequence: KVSequence
    tokens: Sequence[int]
    n_last: int


def evaluate_each(program: Program, work: Sequence[Work], *, hidden: bool = False) -> list[Rows | Exception]:
    """Evaluate pieces of sequences in one pass; float32 [n_last, n_vocab or n_embd] of each.

    If that fails, each piece is evaluated alone, and those that fail again give their error; their sequences are as
    they were.
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
    return evaluate(program, pairs, n_last=[one.n_last for one in work], hidden=hidden)

"""Evaluation of planned tokens of several sequences, in the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Program, evaluate
from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import TakeHidden
from llamacli.engine.compiled_model import CompiledModel
from llamacli.kv import KVSequence
from llamacli.loaders import Progress

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Plan:
    """Tokens to evaluate next in a sequence of the KV cache.

    - `ids`: int32 [n].
    - `adapters`: the LoRA adapters that the sequence's cells are computed with.
    - `n_last`: the number of last tokens whose logits are wanted.
    - `n_ahead`: the number of last tokens that are only drafted.
    - `take_hidden`: takes the hidden states of the tokens, or None.
    - `keep`: called with checkpoints of recurrent states, which are its own then; None without such states.
    """

    sequence: KVSequence
    ids: Ids
    adapters: Adapters
    n_last: int = 1
    n_ahead: int = 0
    take_hidden: TakeHidden | None = None
    keep: Callable[[KVSequence], None] | None = None


def evaluate_plans(model: CompiledModel, plans: Sequence[Plan], progress: Progress | None = None) -> list[Logits]:
    """Evaluate plans, those with the same adapters in the same batches.

    Returns the logits of each, float32 [n_last, n_vocab]. Errors, and what is left after them, are those of
    `llamacli.engine.evaluate`.
    """
    groups: dict[Adapters, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault(plan.adapters, []).append(i)
    results: dict[int, Logits] = {}
    for adapters, members in groups.items():
        logits = _evaluate_group(model.program_with(adapters), [plans[i] for i in members], progress)
        results |= zip(members, logits, strict=True)
    return [results[i] for i in range(len(plans))]


def _evaluate_group(program: Program, plans: Sequence[Plan], progress: Progress | None) -> list[Logits]:
    keepers, takers = [plan.keep for plan in plans], [plan.take_hidden for plan in plans]

    def keep(i: int, sequence: KVSequence) -> None:
        keeper = keepers[i]
        if keeper is None:
            sequence.close()
        else:
            keeper(sequence)

    return evaluate(
        program,
        [(plan.sequence, plan.ids) for plan in plans],
        n_last=[plan.n_last for plan in plans],
        n_ahead=[plan.n_ahead for plan in plans],
        hidden_out=takers if any(takers) else None,
        checkpoint=keep if any(keepers) else None,
        progress=progress,
    )

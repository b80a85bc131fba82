"""Evaluation of chunks of sequences, in the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import evaluate
from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import TakeHidden
from llamacli.engine.compiled_model import CompiledModel
from llamacli.kv import KVSequence
from llamacli.loaders import Progress

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Chunk:
    """Next tokens of a sequence: of a decode step or chunked prefill.

    - `cache`: the sequence's cache, which holds the tokens before them.
    - `ids`: int32 [n].
    - `adapters`: the LoRA adapters that the cells are computed with.
    - `n_last`: the number of last tokens whose logits are wanted.
    - `n_ahead`: the number of last tokens that are only drafted.
    - `take_hidden`: takes the hidden states of the tokens, or None.
    - `keep`: called with checkpoints of recurrent states, which it may fork; None without such states.
    """

    cache: KVSequence
    ids: Ids
    adapters: Adapters = ()
    n_last: int = 1
    n_ahead: int = 0
    take_hidden: TakeHidden | None = None
    keep: Callable[[KVSequence], None] | None = None


def evaluate_chunks(
    model: CompiledModel, chunks: Sequence[Chunk], *, hidden: bool = False, progress: Progress | None = None
) -> list[Logits]:
    """Evaluate chunks, those with the same LoRA adapters in the same batches.

    Returns the logits of each, float32 [n_last, n_vocab], or with `hidden` the rows that the output layer reads,
    [n_last, n_embd]. Errors, and what is left after them, are those of `llamacli.engine.evaluate`.
    """
    adapters = chunks[0].adapters
    others = [i for i, chunk in enumerate(chunks) if chunk.adapters != adapters] if len(chunks) > 1 else ()
    if not others:
        return _evaluate(model, chunks, hidden, progress)
    same = [i for i in range(len(chunks)) if i not in others]
    results = dict(zip(same, _evaluate(model, [chunks[i] for i in same], hidden, progress), strict=True))
    rest = evaluate_chunks(model, [chunks[i] for i in others], hidden=hidden, progress=progress)
    results |= zip(others, rest, strict=True)
    return [results[i] for i in range(len(chunks))]


def evaluate_each(model: CompiledModel, chunks: Sequence[Chunk], *, hidden: bool = False) -> list[Logits | Exception]:
    """Evaluate chunks as `evaluate_chunks` does, with errors confined to their sequences.

    If it fails, each chunk is evaluated alone, and those that fail again give their error; their caches are as they
    were.
    """
    try:
        return [*evaluate_chunks(model, chunks, hidden=hidden)]
    except Exception as error:
        if len(chunks) == 1:
            return [error]
    results: list[Logits | Exception] = []
    for chunk in chunks:
        try:
            results += evaluate_chunks(model, [chunk], hidden=hidden)
        except Exception as error:
            results.append(error)
    return results


def _evaluate(model: CompiledModel, chunks: Sequence[Chunk], hidden: bool, progress: Progress | None) -> list[Logits]:
    def checkpoint(i: int, cache: KVSequence) -> None:
        keep = chunks[i].keep
        if keep is not None:
            keep(cache)
        cache.close()

    takers = [chunk.take_hidden for chunk in chunks]
    return evaluate(
        model.program_with(chunks[0].adapters),
        [(chunk.cache, chunk.ids) for chunk in chunks],
        n_last=[chunk.n_last for chunk in chunks],
        n_ahead=[chunk.n_ahead for chunk in chunks],
        hidden=hidden,
        hidden_out=takers if any(takers) else None,
        checkpoint=checkpoint if any(chunk.keep for chunk in chunks) else None,
        progress=progress,
    )

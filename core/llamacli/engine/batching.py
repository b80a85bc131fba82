"""Running tokens of one or of many sequences through a program, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Program
from llamacli.kv import N_BATCH, KVSequence
from llamacli.loaders import Progress
from llamacli.ops.run import Span

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


def evaluate(
    program: Program,
    work: Sequence[tuple[KVSequence, Ids]],
    *,
    all_logits: bool = False,
    progress: Progress | None = None,
) -> list[Logits]:
    """Let each sequence go on with its tokens, int32 [n], all sequences in the same passes over the weights.

    Returns for each its logits, float32 [n, n_vocab], or without `all_logits` [1, n_vocab] of its last token; for no
    tokens, none. What is computed does not depend on what else is in a batch. The sequences are of one pool, each is
    there once, and has room. If anything is raised, all are as they were; an interrupt at the very end may find some of
    them gone on. `progress` is called with the tokens done and those in all, where they take more than one pass.
    """
    n_done, n_tokens = 0, sum(len(ids) for _, ids in work)
    if len(work) == 1 and 0 < n_tokens <= N_BATCH:
        return [_one_pass(program, *work[0], all_logits)]
    if progress is not None and n_tokens > N_BATCH:
        progress(0, n_tokens)
    starts = [len(sequence.tokens) for sequence, _ in work]
    parts: list[list[Logits]] = [[] for _ in work]
    try:
        for pieces in _batches([len(ids) for _, ids in work]):
            spans = [Span(work[i][0], starts[i] + first, n) for i, first, n in pieces]
            for span in spans:
                span.sequence.reserve(span.start, span.n)
            ids = np.concatenate([work[i][1][first : first + n] for i, first, n in pieces])
            logits = program.forward(ids, spans, all_logits=all_logits)
            n_done += len(ids)
            if progress is not None and n_tokens > N_BATCH:
                progress(n_done, n_tokens)
            row = 0
            for i, first, n in pieces:
                n_rows = n if all_logits else 1
                parts[i].append(logits[row : row + n_rows])
                row += n_rows
                work[i][0].evict(starts[i] + first + n, since=starts[i])
    except BaseException:
        for (sequence, _), start in zip(work, starts, strict=True):
            sequence.truncate(start)
        raise
    for sequence, ids in work:
        sequence.tokens += ids.tolist()
        sequence.evict(len(sequence.tokens))
    n_vocab = next((part[0].shape[1] for part in parts if part), 0)
    none = np.empty((0, n_vocab), np.float32)
    return [none if not part else np.concatenate(part) if all_logits else part[-1] for part in parts]


def _one_pass(program: Program, sequence: KVSequence, ids: Ids, all_logits: bool) -> Logits:
    """The usual case, a token of one sequence, without what many take."""
    start, n = len(sequence.tokens), len(ids)
    try:
        sequence.reserve(start, n)
        logits = program.forward(ids, [Span(sequence, start, n)], all_logits=all_logits)
    except BaseException:
        sequence.truncate(start)
        raise
    sequence.tokens += ids.tolist()
    sequence.evict(start + n)
    return logits


def _batches(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Share out tokens: in each batch, of some sequences, its number, the first of its tokens and how many."""
    batch: list[tuple[int, int, int]] = []
    room = N_BATCH
    for i, length in enumerate(lengths):
        done = 0
        while done < length:
            n = min(room, length - done)
            batch.append((i, done, n))
            done, room = done + n, room - n
            if not room:
                yield batch
                batch, room = [], N_BATCH
    if batch:
        yield batch

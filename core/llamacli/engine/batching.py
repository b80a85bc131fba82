"""Batched evaluation of the tokens of one or many sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Program
from llamacli.errors import InvalidRequestError
from llamacli.graph import Graph
from llamacli.inputs import Inputs
from llamacli.kv import N_BATCH, KVSequence
from llamacli.loaders import Progress
from llamacli.ops.run import Span

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

CHECKPOINT_TOKENS = 2048
"""Tokens of a prompt after which recurrent states are checkpointed; a multiple of a batch."""

Checkpoint = Callable[[int, KVSequence], None]
"""Called with the index of a sequence and a checkpoint of it, which the caller of `evaluate` owns."""

TakeHidden = Callable[[int, Sequence[int], Logits, int], None]
"""Called after each batch with the position of a sequence's first token there, its tokens, their hidden states, float32
[n, n_embd], and how many of the last tokens are only drafted."""


def evaluate(
    program: Program,
    given: Sequence[tuple[KVSequence, Ids | Inputs]],
    *,
    all_logits: bool = False,
    n_last: Sequence[int] | None = None,
    hidden: bool = False,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    n_ahead: Sequence[int] | None = None,
    hidden_in: Sequence[Logits] | None = None,
    hidden_out: Sequence[TakeHidden | None] | None = None,
) -> list[Logits]:
    """Evaluate the next tokens of many sequences in the same batches.

    Tokens are int32 [n], or an `Inputs` of n tokens: their positions, unless given, follow the number of tokens of the
    sequence, so that the positions of tokens after explicit ones have to be given (`Contents.slice`). The sequence gets
    their content keys. Returns for each sequence its logits, float32 [n, n_vocab] with `all_logits`, else [1,
    n_vocab] of its last token, or of as many last tokens as `n_last` says; for no tokens, [0, n_vocab or 0]. With
    `hidden`, rows are those that the output layer reads, [.., n_embd]. A token's logits do not depend on what else is
    in a batch. Each sequence is there once and has room; those of different pools go into different batches. `progress`
    is called with the tokens done and those in all, where they take more than one batch.

    Sequences can be truncated by as many last tokens as `n_ahead` says afterwards, whatever their sliding windows are;
    those with recurrent states by exactly as many. `checkpoint` is called with forks of the latter within long prompts,
    and, for prompts without `n_ahead`, with one that lacks only the last token.

    `hidden_in` are the hidden states that `g.previous_hidden` reads, float32 [n, n_embd] for each sequence.
    `hidden_out` take those of the sequences' own tokens, where they are not None.

    If anything is raised, all sequences are as they were, but that an interrupt at the very end may find some of them
    with their tokens. Raises MemoryError, ClosedError; InvalidRequestError for inputs that the model cannot compute.
    """
    inputs: list[Inputs | None] = [None] * len(given)
    work = list[tuple[KVSequence, Ids]]()
    for sequence, ids in given:
        if isinstance(ids, Inputs):
            inputs[len(work)] = ids = _checked(program, sequence, ids)
            ids = ids.ids
        work.append((sequence, ids))
    starts = [len(sequence.tokens) for sequence, _ in work]
    rows: list[list[Logits]] = [[] for _ in work]
    n_behind = [
        n_ahead[i] if n_ahead and n_ahead[i] else int(checkpoint is not None and len(ids) > 1)
        for i, (_, ids) in enumerate(work)
    ]  # last tokens before which recurrent states are kept
    n_wanted = [len(ids) for _, ids in work] if all_logits else [1] * len(work) if n_last is None else n_last
    n_done, n_tokens = 0, 0 if progress is None else sum(len(ids) for _, ids in work)
    if progress is not None and n_tokens > N_BATCH:
        progress(0, n_tokens)
    try:
        for batch in _batches(work, inputs):
            spans, pieces = [], []
            for i, first, n in batch:
                behind = first + n + n_behind[i] - len(work[i][1])  # of this batch, if it has the place
                is_here = n_behind[i] and 0 < behind <= n
                work[i][0].reserve(starts[i] + first, n, n_behind=behind if is_here else 0)
                hidden_rows = None if hidden_in is None else hidden_in[i][first : first + n]
                one = inputs[i]
                part = None if one is None else one.part(first, first + n)
                spans.append(Span(work[i][0], starts[i] + first, n, hidden_rows, part))
                pieces.append(work[i][1][first : first + n])
            ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            counts = [max(0, min(n, n_wanted[i] - len(work[i][1]) + first + n)) for i, first, n in batch]
            with np.errstate(all="ignore"):  # what overflows reaches the logits, and is refused when drawing
                if hidden_out is not None and any(hidden_out[i] for i, *_ in batch):
                    logits, states = program.forward_with_hidden(ids, spans, counts)
                    _give_hidden(states, batch, starts, pieces, hidden_out, [len(ids) for _, ids in work], n_ahead)
                else:
                    logits = program.forward(ids, spans, n_last=counts, hidden=hidden)
            row = 0
            for (i, first, n), n_rows in zip(batch, counts, strict=True):
                rows[i].append(logits[row : row + n_rows])
                row += n_rows
                if first + n < len(work[i][1]):  # more of it follows: pages behind its windows are free already
                    work[i][0].advance(starts[i] + first + n)
                    if checkpoint is not None and not (first + n) % CHECKPOINT_TOKENS:
                        sequence, done = work[i][0], _keys(work[i][1], inputs[i])[: first + n]
                        checkpoint(i, sequence.fork_within(sequence.tokens + done))
            n_done += len(ids)
            if progress is not None and n_tokens > N_BATCH:
                progress(n_done, n_tokens)
    except BaseException:
        for (sequence, _), start in zip(work, starts, strict=True):
            sequence.truncate(start)
        raise
    for i, (sequence, ids) in enumerate(work):
        if len(ids):
            sequence.commit(_keys(ids, inputs[i]), n_ahead=n_ahead[i] if n_ahead else 0)
            if checkpoint is not None and len(ids) > 1 and not (n_ahead and n_ahead[i]):
                checkpoint(i, sequence.fork_before_last())
            sequence.finish()
    return [_joined(parts) if parts else _no_rows(rows) for parts in rows]


def _give_hidden(
    states: Logits,
    batch: Sequence[tuple[int, int, int]],
    starts: Sequence[int],
    pieces: Sequence[Ids],
    takers: Sequence[TakeHidden | None],
    lengths: Sequence[int],
    n_ahead: Sequence[int] | None,
) -> None:
    """Give the hidden states of a batch to its sequences' takers."""
    row = 0
    for (i, first, n), piece in zip(batch, pieces, strict=True):
        take, n_certain = takers[i], lengths[i] - (n_ahead[i] if n_ahead else 0)
        if take is not None:
            n_drafted = min(n, max(0, first + n - n_certain))
            take(starts[i] + first, piece.tolist(), states[row : row + n], n_drafted)
        row += n


def _keys(ids: Ids, inputs: Inputs | None) -> list[int]:
    return ids.tolist() if inputs is None else inputs.keys


def _checked(program: Program, sequence: KVSequence, inputs: Inputs) -> Inputs:
    """Check inputs, and fill in the position of each token."""
    graph, start = program.graph, len(sequence.tokens)
    check_inputs(graph, inputs)
    placed = inputs.placed(start, graph.n_components)
    if placed.positions is not None:
        cells = np.arange(start, start + len(inputs))
        if graph.uses_distance and (placed.positions[:, 0] != cells).any():
            raise InvalidRequestError(
                "positions other than the tokens' numbers are not supported by a model with sliding windows, chunks or "
                "ALiBi, which count tokens"
            )
        if program.max_positions is not None and placed.positions.max(initial=0) >= program.max_positions:
            raise InvalidRequestError(
                f"position {placed.positions.max()} is beyond the {program.max_positions} that the model has learned"
            )
    return placed


def check_inputs(graph: Graph, inputs: Inputs) -> None:
    """Check that a model's graph can compute inputs, at any place.

    Raises InvalidRequestError for ids, a width of embeddings, a number of position components or spans that it cannot.
    """
    embedding = graph.embedding
    if embedding is not None and len(inputs):
        ids = np.delete(inputs.ids, inputs.rows)
        if len(ids) and ids.max() >= embedding.table.shape[0]:
            raise InvalidRequestError(f"token {ids.max()} is not an id from 0 to {embedding.table.shape[0] - 1}")
    if inputs.embeddings is not None:
        width = inputs.embeddings.shape[1]
        if embedding is None or width != embedding.out.width:
            expected = "takes none" if embedding is None else f"has embeddings of {embedding.out.width}"
            raise InvalidRequestError(f"embeddings have rows of {width} numbers, and the model {expected}")
    if inputs.positions is not None and inputs.positions.shape[1] > graph.n_components:
        raise InvalidRequestError(
            f"positions have {inputs.positions.shape[1]} components, and the model has one position a token"
        )
    for start, stop in inputs.spans:
        if stop - start > N_BATCH:
            raise InvalidRequestError(
                f"the span of tokens {start} to {stop - 1} is longer than a batch, which has {N_BATCH} tokens"
            )


def _batches(
    work: Sequence[tuple[KVSequence, Ids]], inputs: Sequence[Inputs | None]
) -> Iterator[list[tuple[int, int, int]]]:
    """Split tokens into batches of at most N_BATCH, each of one pool.

    A batch lists sequences: the index, its first token, the number of tokens. Spans are not cut.
    """
    if len(work) == 1 and 0 < len(work[0][1]) <= N_BATCH:  # a lone token, in most cases: spare it the sharing out
        yield [(0, 0, len(work[0][1]))]
        return
    by_pool = sorted(range(len(work)), key=lambda i: id(work[i][0].pool))
    for _, members in itertools.groupby(by_pool, key=lambda i: id(work[i][0].pool)):
        batch: list[tuple[int, int, int]] = []
        room = N_BATCH
        for i in members:
            done = 0
            while done < len(work[i][1]):
                one = inputs[i]
                n = min(room, len(work[i][1]) - done) if one is None else one.largest_piece(done, room)
                if n:
                    batch.append((i, done, n))
                done, room = done + n, room - n
                if not room or not n:  # full, or a span that needs another one
                    yield batch
                    batch, room = [], N_BATCH
        if batch:
            yield batch


def _joined(parts: list[Logits]) -> Logits:
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0] if filled else parts[-1]


def _no_rows(rows: list[list[Logits]]) -> Logits:
    """The logits of no tokens."""
    return np.empty((0, next((parts[0].shape[1] for parts in rows if parts), 0)), np.float32)

"""Batched evaluation of the tokens of one or many sequences."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.adapters import Adapter, Adapters, without_scales
from llamacli.engine.base import Program
from llamacli.engine.stages import StagedProgram
from llamacli.errors import InvalidRequestError
from llamacli.graph import Graph
from llamacli.inputs import Inputs, cell_keys, is_in_span
from llamacli.kv import N_BATCH, KVSequence
from llamacli.loaders import Progress
from llamacli.ops.run import Span
from llamacli.util.settings import Prompts

Batch = list[tuple[int, int, int]]
"""Parts of chunks: the index of each, its first token, the number of tokens."""
Logits = npt.NDArray[np.float32]
Running = deque[tuple[Future[list[Logits]], Batch, list[int]]]
"""Batches in later stages of a pipeline, in order: results, parts, and how many rows of each are wanted."""

CHECKPOINT_TOKENS = 2048
"""Tokens of a prompt after which recurrent states are checkpointed; a multiple of a batch."""

TakeHidden = Callable[[int, Sequence[int], Logits, int, KVSequence], None]
"""Called after each batch with the position of a sequence's first token there, its tokens, their hidden states, float32
[n, n_embd], how many of the last tokens are only drafted, and the sequence."""


@attrs.frozen(eq=False)
class Chunk:
    """Next tokens of a sequence: of a decode step or chunked prefill.

    - `cache`: the sequence's cache, which holds the tokens before them and has room.
    - `ids`: n ids, or an `Inputs` of n tokens. Positions of the latter, unless given, follow the number of cached
      tokens, so that those of tokens after explicit ones have to be given (`Contents.slice`). The cache gets their
      content keys.
    - `adapters`: the LoRA adapters that the cells are computed with.
    - `n_last`: the number of last tokens whose results are wanted. An encoder's text has none.
    - `n_ahead`: the number of last tokens that are only drafted. The cache can be truncated by so many afterwards,
      whatever its sliding windows are; with recurrent states by exactly as many.
    - `n_generated`: the number of last tokens that were generated, drafted ones included. All before them are a prompt,
      which goes through tiles in a program of such prompts, and gets other content keys there.
    - `keep`: called with checkpoints of recurrent states, which it may fork: within long prompts and, without
      `n_ahead`, before the last token. None for no checkpoints.
    - `hidden_in`: hidden states that `g.previous_hidden` reads, float32 [n, n_embd].
    - `take_hidden`: takes the hidden states of the tokens, or None.
    """

    cache: KVSequence
    ids: list[int] | Inputs
    adapters: Adapters = ()
    n_last: int = 1
    n_ahead: int = 0
    n_generated: int = 0
    keep: Callable[[KVSequence], None] | None = None
    hidden_in: Logits | None = None
    take_hidden: TakeHidden | None = None


ProgramOf = Callable[[Adapters], Program]
"""The forward pass with LoRA adapters: `CompiledModel.program_with`."""


def evaluate(
    program_of: ProgramOf, chunks: Sequence[Chunk], *, hidden: bool = False, progress: Progress | None = None
) -> list[Logits]:
    """Evaluate chunks of different sequences in the same batches.

    Returns for each the logits of its last tokens, float32 [n_last, n_vocab]; with `hidden`, the rows that the output
    layer reads, [n_last, n_embd]; for no tokens, [0, n_vocab or 0]. A token's logits do not depend on what else is in a
    batch. Chunks of different pools or adapters go into different batches. `progress` is called with the tokens done
    and the tokens in all, where they take more than one batch.

    If anything is raised, all caches are as they were, but that an interrupt at the very end may find some of them with
    their tokens. Raises MemoryError, ClosedError; InvalidRequestError for inputs that the model cannot compute.
    """
    n_done, n_tokens, is_one, has_spans, piece = 0, 0, True, False, N_BATCH
    starts: list[int] = []
    encoded: list[int] = []
    prompts: list[int] = []  # first tokens of each chunk that go the way of prompts
    rows: list[list[Logits]] = []
    for i, chunk in enumerate(chunks):
        program = program_of(chunk.adapters)
        if isinstance(chunk.ids, Inputs):
            inputs = _placed(program, chunk.cache, chunk.ids)
            chunks = [*chunks[:i], attrs.evolve(chunk, ids=inputs), *chunks[i + 1 :]]
            has_spans |= bool(inputs.spans)
        if isinstance(program, StagedProgram):
            piece = min(piece, program.piece)
        starts.append(len(chunk.cache.tokens))
        encoded.append(_n_encoded(chunk) if program.has_encoder else 0)
        prompts.append(0)
        if program.prompts is Prompts.TILES:
            prompts[i] = len(chunk.ids) - chunk.n_generated
            is_one &= not chunk.n_generated if prompts[0] else not prompts[i]
        rows.append([])
        n_tokens += len(chunk.ids)
        is_one &= chunk.cache.pool is chunks[0].cache.pool and encoded[-1] <= starts[-1]
        if chunk.adapters != chunks[0].adapters:
            is_one &= without_scales(chunk.adapters) == without_scales(chunks[0].adapters)
    if n_tokens <= N_BATCH:
        progress = None
    if progress is not None:
        progress(0, n_tokens)
    if has_spans:  # which are not cut
        piece = N_BATCH
    if is_one and 0 < n_tokens <= piece:
        batches: Iterable[Batch] = ([(i, 0, len(chunk.ids)) for i, chunk in enumerate(chunks) if len(chunk.ids)],)
    else:
        batches = _batches(chunks, starts, encoded, prompts, piece)
    running = Running()
    try:
        for batch in batches:
            program = program_of(chunks[batch[0][0]].adapters)
            n_done += _run(program, chunks, batch, starts, encoded, prompts, rows, hidden, running)
            if isinstance(program, StagedProgram) and len(running) >= program.n_stages:
                _finish(running, rows)
            if progress is not None:
                progress(n_done, n_tokens)
        while running:
            _finish(running, rows)
    except BaseException:
        for chunk, start in zip(chunks, starts, strict=True):
            chunk.cache.truncate(start)
        raise
    for i, chunk in enumerate(chunks):
        if len(chunk.ids):
            keys = chunk.ids.keys if isinstance(chunk.ids, Inputs) else chunk.ids
            if chunk.n_generated:
                keys = _keys(program_of(chunk.adapters), chunk, prompts[i])
            chunk.cache.commit(keys, n_ahead=chunk.n_ahead)
            if chunk.keep is not None and len(chunk.ids) > 1 and not chunk.n_ahead:
                _keep(chunk.keep, chunk.cache.fork_before_last())
            if chunk.cache.pool.layout.recurrent:
                chunk.cache.finish()
    return [parts[0] if len(parts) == 1 else _joined(parts, rows) for parts in rows]


def evaluate_each(program_of: ProgramOf, chunks: Sequence[Chunk], *, hidden: bool = False) -> list[Logits | Exception]:
    """Evaluate chunks as `evaluate` does, with errors confined to their sequences.

    If it fails, each chunk is evaluated alone, and those that fail again give their error.
    """
    try:
        return [*evaluate(program_of, chunks, hidden=hidden)]
    except Exception as error:
        if len(chunks) == 1:
            return [error]
    results: list[Logits | Exception] = []
    for chunk in chunks:
        try:
            results += evaluate(program_of, [chunk], hidden=hidden)
        except Exception as error:
            results.append(error)
    return results


def _finish(running: Running, rows: Sequence[list[Logits]]) -> None:
    """Wait for the first batch that runs, and append its results."""
    future, batch, counts = running.popleft()
    (logits,), row = future.result(), 0
    for (i, _, _), n_rows in zip(batch, counts, strict=True):
        rows[i].append(logits[row : row + n_rows])
        row += n_rows


def _run(
    program: Program,
    chunks: Sequence[Chunk],
    batch: Batch,
    starts: Sequence[int],
    encoded: Sequence[int],
    prompts: Sequence[int],
    rows: Sequence[list[Logits]],
    hidden: bool,
    running: Running,
) -> int:
    """Run a batch, and append its results to `rows`.

    That of a pipeline is appended to `running`: later stages compute it while the first begins another one. Returns its
    number of tokens.
    """
    spans, parts, counts, takes_hidden = [], [], [], False
    for i, first, n in batch:
        chunk, ids, start, n_left = chunks[i], chunks[i].ids, starts[i] + first, len(chunks[i].ids) - first - n
        n_kept_before = chunk.n_ahead or int(chunk.keep is not None and len(chunk.ids) > 1)
        behind = n_kept_before - n_left  # last tokens of this batch before which recurrent states are kept
        chunk.cache.reserve(start, n, n_behind=behind if 0 < behind <= n and n_kept_before else 0)
        hidden_in = None if chunk.hidden_in is None else chunk.hidden_in[first : first + n]
        part = None
        if isinstance(ids, Inputs):
            part, ids = ids.part(first, first + n), ids.ids.tolist()
        scales = np.array([scale for _, scale in chunk.adapters]) if chunk.adapters else None
        span = Span(chunk.cache, start, n, hidden_in, part, scales, encoded[i], first < prompts[i])
        spans.append(span)
        parts.append(ids[first : first + n])
        has_rows = not encoded[i] or not span.encodes
        counts.append(max(0, min(n, chunk.n_last - n_left)) if has_rows else 0)
        takes_hidden |= has_rows and chunk.take_hidden is not None
    tokens = np.array(list(itertools.chain.from_iterable(parts)), np.int32)
    with np.errstate(all="ignore"):  # what overflows reaches the logits, and is refused when drawing
        if takes_hidden:
            logits, states = program.forward_with_hidden(tokens, spans, counts)
            _give_hidden(states, batch, spans, parts, chunks)
        elif isinstance(program, StagedProgram):
            future = program.submit(tokens, spans, counts, "hidden" if hidden else "logits")
            running.append((future, batch, counts))
            logits = None
        else:
            logits = program.forward(tokens, spans, counts, hidden=hidden)
    row = 0
    for (i, first, n), n_rows in zip(batch, counts, strict=True):
        chunk = chunks[i]
        if logits is not None:
            rows[i].append(logits[row : row + n_rows])
            row += n_rows
        if first + n < len(chunk.ids):  # more of it follows: pages behind its windows are free already
            chunk.cache.advance(starts[i] + first + n)
            if chunk.keep is not None and not (first + n) % CHECKPOINT_TOKENS:
                keys = _keys(program, chunk, prompts[i])
                while running:  # a checkpoint may outlive a batch that fails
                    _finish(running, rows)
                _keep(chunk.keep, chunk.cache.fork_within(chunk.cache.tokens + keys[: first + n]))
    return len(tokens)


def _keys(program: Program, chunk: Chunk, n_prompt: int) -> list[int]:
    keys = chunk.ids.keys if isinstance(chunk.ids, Inputs) else chunk.ids
    return cell_keys(keys, n_prompt) if chunk.n_generated and program.prompts is Prompts.TILES else keys


def _keep(keep: Callable[[KVSequence], None], checkpoint: KVSequence) -> None:
    keep(checkpoint)
    checkpoint.close()


def _give_hidden(
    states: Logits,
    batch: Batch,
    spans: Sequence[Span],
    parts: Sequence[list[int]],
    chunks: Sequence[Chunk],
) -> None:
    row = 0
    for (i, first, n), span, part in zip(batch, spans, parts, strict=True):
        chunk = chunks[i]
        if chunk.take_hidden is not None:
            n_drafted = min(n, max(0, first + n - len(chunk.ids) + chunk.n_ahead))
            chunk.take_hidden(span.start, part, states[row : row + n], n_drafted, chunk.cache)
        row += n


def _placed(program: Program, cache: KVSequence, inputs: Inputs) -> Inputs:
    graph, start = program.graph, len(cache.tokens)
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
        if embedding is None or width != graph.embedding_width:
            expected = "takes none" if embedding is None else f"has embeddings of {graph.embedding_width}"
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


def _n_encoded(chunk: Chunk) -> int:
    """Tokens of the encoder's text in a chunk's sequence.

    Raises InvalidRequestError unless it begins with them, has no other spans and no explicit positions, and a token of
    the decoder where results are wanted.
    """
    cached, ids = chunk.cache.tokens, chunk.ids
    keys = cached or (ids.keys if isinstance(ids, Inputs) else ids)
    n = bisect.bisect_left(keys, True, key=lambda key: not is_in_span(key))
    if not n:
        raise InvalidRequestError(
            "this model has an encoder: its context begins with a text for it, see Model.encoder_inputs"
        )
    if isinstance(ids, Inputs) and (ids.spans != (() if cached else ((0, n),)) or ids.positions is not None):
        raise InvalidRequestError("a model with an encoder takes one span, its text, and no explicit positions")
    if chunk.n_last and len(cached) + len(ids) <= n:
        raise InvalidRequestError("the text for the encoder has no logits: a token of the decoder must follow")
    return n


def _batches(
    chunks: Sequence[Chunk], starts: Sequence[int], encoded: Sequence[int], prompts: Sequence[int], piece: int
) -> Iterator[Batch]:
    """Split chunks into batches of at most `piece` tokens.

    Each is of one pool and set of adapters; spans of inputs are not cut. The encoder's texts come first, apart; then
    prompts, where they go another way than generated tokens.
    """
    groups = dict[tuple[int, tuple[Adapter, ...], bool, bool], list[tuple[int, int, int]]]()
    for encodes, is_prompt in ((True, True), (False, True), (False, False)):
        for i, (chunk, start, n) in enumerate(zip(chunks, starts, encoded, strict=True)):
            first, stop = (0, n - start) if encodes else (max(0, n - start), len(chunk.ids))
            if not encodes:
                first, stop = (first, min(stop, prompts[i])) if is_prompt else (max(first, prompts[i]), stop)
            if first < stop:
                key = id(chunk.cache.pool), without_scales(chunk.adapters), encodes, is_prompt
                groups.setdefault(key, []).append((i, first, stop))
    for members in groups.values():
        batch: list[tuple[int, int, int]] = []
        room = piece
        for i, done, stop in members:
            while done < stop:
                ids, n = chunks[i].ids, min(room, stop - done)
                n = ids.largest_piece(done, n) if isinstance(ids, Inputs) else n
                if n:
                    batch.append((i, done, n))
                done, room = done + n, room - n
                if not room or not n:  # full, or a span that needs another one
                    yield batch
                    batch, room = [], piece
        if batch:
            yield batch


def _joined(parts: list[Logits], rows: list[list[Logits]]) -> Logits:
    """Join the logits of a chunk's parts, if it has any."""
    if not parts:
        return np.empty((0, next((parts[0].shape[1] for parts in rows if parts), 0)), np.float32)
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0] if filled else parts[-1]

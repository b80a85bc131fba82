"""Pipeline parallelism: a model whose layers are computed by several stages.

The first stage is the caller's process: it has the tokens of all sequences, their page tables, and decides about pages.
Other stages have the pages' parts of their own layers, under the addresses that the first one gave them, and know
nothing of sequences. A batch names the pages that it reads and writes, and what happened to pages since the last one:
forks, rewinds and evictions need no messages of their own.
"""

from __future__ import annotations

import abc
import ctypes
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Program, Prompts
from llamacli.engine.cutting import StageGraph
from llamacli.errors import InvalidRequestError, StageError
from llamacli.graph import Graph, Tensor
from llamacli.inputs import Inputs
from llamacli.kernels.kv_types.types import PAGE, KVType
from llamacli.kv import N_BATCH, KVLayout, KVPool, KVSequence
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.kv.pool import ALLOCATED, CELLS, COPIED, Table
from llamacli.kv.sequence import copy_cells
from llamacli.loaders import ModelFile
from llamacli.ops.moe import MoE
from llamacli.ops.run import Span
from llamacli.ops.shift_plan import ShiftPlan

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

RESULTS = ("logits", "hidden", "both")
"""What the last stage computes: `Program.forward`, with `hidden`, or `forward_with_hidden`."""

_PIECE = 128
"""Tokens of a batch of a pipeline: a prompt of 512 is in several stages at once, and such batches are as fast."""

SPAN = np.dtype([(name, np.int64) for name in ("start", "n", "seq_len", "n_behind", "n_encoded", "n_last", "inputs")])
"""A span: as `Span`, `n_behind` of its sequence, `n_last` of `forward`, and whether positions follow."""


def _none(dtype: Any, width: int) -> Callable[[], npt.NDArray[Any]]:
    return lambda: np.empty((0, width), dtype)


@attrs.frozen(eq=False)
class StageBatch:
    """Batch of tokens for a stage.

    - `kv_type`: types of cached keys and values; `result`: one of RESULTS.
    - `log`: changes of pages since the batch before, int64 [m, 5], see `llamacli.kv.pool.PageLog`.
    - `tokens`: int32 [n]; `spans`: SPAN [n_spans].
    - `tables`: page tables of each group of each span, one after the other, int64; `counts`: how many pages each has,
      int64 [n_spans, n_groups].
    - `positions`: int32 [m, k], those of all spans with inputs; `ranges`: their bidirectional spans, int64 [r, 3]: the
      number of the span, start, stop.
    - `rows`: where embeddings are in the place of tokens, int64 [e, 2]: the number of the span, and the row in it.
    """

    kv_type: KVType
    result: str
    log: Integers
    tokens: npt.NDArray[np.int32]
    spans: npt.NDArray[np.void]
    tables: Integers
    counts: Integers
    positions: npt.NDArray[np.int32] = attrs.field(factory=_none(np.int32, 1))
    ranges: Integers = attrs.field(factory=_none(np.int64, 3))
    rows: Integers = attrs.field(factory=_none(np.int64, 2))

    @classmethod
    def of(
        cls, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str, log: Integers
    ) -> StageBatch:
        """Make a batch of spans of the first stage's sequences."""
        heads, tables, counts = np.zeros(len(spans), SPAN), [], []
        positions, ranges, rows = list[npt.NDArray[np.int32]](), list[tuple[int, ...]](), list[tuple[int, ...]]()
        layout = spans[0].sequence.pool.layout
        for i, (span, n) in enumerate(zip(spans, n_last, strict=True)):
            sequence, inputs = span.sequence, span.inputs
            has_positions = inputs is not None and inputs.positions is not None
            heads[i] = span.start, span.n, sequence.seq_len, sequence.n_behind, span.n_encoded, n, has_positions
            n_pages = -(-(span.start + span.n) // PAGE)
            own = [
                table if group.recurrent else table[:n_pages]
                for group, table in zip(layout.groups, sequence.tables, strict=True)
            ]
            tables += own
            counts.append([len(table) for table in own])
            if inputs is not None:
                positions += [inputs.positions] if inputs.positions is not None else []
                ranges += [(i, start, stop) for start, stop in inputs.spans]
                rows += [(i, row) for row in inputs.rows.tolist()]
        return cls(
            layout.kv_type, result, log, tokens, heads,
            np.concatenate(tables) if tables else np.empty(0, np.int64), np.array(counts, np.int64),
            np.concatenate(positions) if positions else np.empty((0, 1), np.int32),
            np.array(ranges, np.int64).reshape(-1, 3), np.array(rows, np.int64).reshape(-1, 2),
        )  # fmt: skip


class Stage(Protocol):
    """Pipeline stage behind the first one.

    Batches are computed in the order of the calls.
    """

    name: str

    @property
    def is_lost(self) -> bool:
        """True once no batch can be computed any more."""

    def start(self, batch: StageBatch, received: Floats) -> Future[list[Floats]]:
        """Begin a batch with what the stage before sent, float32 [n, received_width].

        The result is a list of one array, or of two for `both`. Raises StageError, or the future does.
        """

    def follow(self, kv_type: KVType, log: Integers) -> None:
        """Take changes of pages alone."""

    def close(self) -> None:
        """End the stage."""


class _MirrorPages:
    """Pages of a stage, by their addresses in the first stage."""

    def __init__(self, layout: KVLayout):
        self.pool = KVPool(layout)
        self._held: list[dict[int, Table]] = [{} for _ in layout.groups]
        self._sequences: list[KVSequence] = []

    def follow(self, log: Integers) -> None:
        """Apply changes of pages.

        Raises the first error, after all others are applied.
        """
        failed: Exception | None = None
        for change, group, page, source, cells in log.tolist():
            if not 0 <= group < len(self._held):
                raise StageError(f"a batch has group {group} of the {len(self._held)} groups of pages")
            try:
                self._apply(change, group, page, source, cells)
            except (MemoryError, StageError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _apply(self, change: int, group: int, page: int, source: int, cells: int) -> None:
        if change == CELLS:
            lane, n, is_same = cells & 255, cells >> 8 & 255, bool(cells >> 16)
            if lane + n > PAGE:
                raise StageError(f"a batch copies cells {lane} to {lane + n} of a page of {PAGE}")
            pages = self.address(group, page), self.address(group, source)
            copy_cells(self.pool.layout, group, *pages, lane, n, same_prefix=is_same)
            return
        self._drop(group, page)
        if change in (ALLOCATED, COPIED):
            cell = np.zeros(1, np.int64)
            self.pool.groups[group].allocate(cell, 0, zeroed=change == ALLOCATED)
            self._held[group][page] = cell
            if change == COPIED:
                ctypes.memmove(int(cell[0]), self.address(group, source), self.pool.groups[group].page_bytes)

    def address(self, group: int, page: int) -> int:
        """Address here of a page. Raises StageError for an unknown one."""
        cell = self._held[group].get(page)
        if cell is None:
            raise StageError(f"a batch reads page {page:#x} of group {group}, which was not allocated")
        return int(cell[0])

    def _drop(self, group: int, page: int) -> None:
        cell = self._held[group].pop(page, None)
        if cell is not None:
            self.pool.groups[group].release(cell, 0)

    def sequence(self, i: int, head: np.void, tables: Iterable[Integers]) -> KVSequence:
        """Sequence of a batch, with these pages of the first stage.

        Number `i`, whose tables `forget` empties after the batch.
        """
        while len(self._sequences) <= i:
            self._sequences.append(KVSequence(self.pool, int(head["seq_len"])))
        sequence = self._sequences[i]
        if sequence.seq_len != head["seq_len"]:
            sequence = self._sequences[i] = KVSequence(self.pool, int(head["seq_len"]))
        for g, table in enumerate(tables):
            sequence.tables[g][: len(table)] = [self.address(g, page) if page else 0 for page in table.tolist()]
        sequence.place_states(int(head["n_behind"]))
        return sequence

    def forget(self) -> None:
        """Empty the tables of the batch: their pages are not the sequences'."""
        for sequence in self._sequences:
            for table in sequence.tables:
                table[:] = 0


class StageRunner:
    """A stage's program and its pages, behind the first stage."""

    def __init__(self, program: Program):
        self.program = program
        graph = program.graph
        assert isinstance(graph, StageGraph)
        self._graph = graph
        self._pages: dict[KVType, _MirrorPages] = {}

    def follow(self, kv_type: KVType, log: Integers) -> None:
        """Take changes of pages. Raises OutOfMemoryError, StageError."""
        self._of(kv_type).follow(log)

    def run(self, batch: StageBatch, received: Floats) -> list[Floats]:
        """Compute a batch.

        Raises StageError for one that does not fit the stage, OutOfMemoryError.
        """
        pages = self._of(batch.kv_type)
        pages.follow(batch.log)
        try:
            spans = self._spans(pages, batch, received)
            n_last = batch.spans["n_last"].tolist()
            with np.errstate(all="ignore"):
                if batch.result == "both":
                    return [*self.program.forward_with_hidden(batch.tokens, spans, n_last)]
                return [self.program.forward(batch.tokens, spans, n_last, hidden=batch.result == "hidden")]
        finally:
            pages.forget()

    def _of(self, kv_type: KVType) -> _MirrorPages:
        if kv_type not in self._pages:
            graph = self._graph
            self._pages[kv_type] = _MirrorPages(KVLayout.of(graph.states, kv_type, graph.recurrent, graph.held))
        return self._pages[kv_type]

    def _spans(self, pages: _MirrorPages, batch: StageBatch, received: Floats) -> list[Span]:
        groups, heads = pages.pool.layout.groups, batch.spans
        n, edges = heads["n"], np.cumsum([0, *batch.counts.reshape(-1).tolist()])
        _expect(len(heads) > 0 and bool((n > 0).all()) and n.sum() == len(batch.tokens), "its tokens and spans differ")
        _expect(len(batch.tokens) == len(received), f"{len(batch.tokens)} tokens have {len(received)} rows")
        _expect(batch.counts.shape == (len(heads), len(groups)), "its page tables are of other groups")
        _expect(bool((batch.counts >= 0).all()) and edges[-1] == len(batch.tables), "its page tables are cut")
        _expect(bool((heads["start"] >= 0).all() and (heads["seq_len"] >= heads["start"] + n).all()), "it is too long")
        spans, row, at = [], 0, 0
        for i, head in enumerate(heads):
            start, n_rows = int(head["start"]), int(head["n"])
            own = [batch.tables[edges[j] : edges[j + 1]] for j in range(i * len(groups), (i + 1) * len(groups))]
            for group, table in zip(groups, own, strict=True):
                n_pages = -(-(start + n_rows) // PAGE)
                fits = len(table) == n_pages and bool(table[start // PAGE :].all())
                _expect(group.recurrent or fits, "its tokens have no pages")
            sequence = pages.sequence(i, head, own)
            inputs, n_positions = None, n_rows if head["inputs"] else 0
            ranges, rows = batch.ranges[batch.ranges[:, 0] == i, 1:], batch.rows[batch.rows[:, 0] == i, 1]
            if n_positions or len(ranges) or len(rows):
                positions = batch.positions[at : at + n_positions] if n_positions else None
                _expect(positions is None or len(positions) == n_rows, "its positions are cut")
                ids, spans_in = batch.tokens[row : row + n_rows], tuple((a, b) for a, b in ranges.tolist())
                inputs = Inputs(ids, [], None, rows, positions, spans_in)
            at += n_positions
            rows_in = received[row : row + n_rows]
            spans.append(Span(sequence, start, n_rows, rows_in, inputs, None, int(head["n_encoded"])))
            row += n_rows
        width = self._graph.received_by(encodes=spans[0].encodes)
        _expect(received.shape[1:] == (width,), f"its rows have {received.shape[1:]} numbers instead of {width}")
        return spans


def _expect(holds: bool, fault: str) -> None:
    if not holds:
        raise StageError(f"a batch does not fit the stage: {fault}")


class DividedProgram(abc.ABC):
    """Program of a model on several machines.

    See `llamacli.engine.base.Program`. The `first` part is here. `replaced` gives stages in place of these, of which
    one is lost.
    """

    prompts = Prompts.REGISTERS

    def __init__(
        self,
        graph: StageGraph,
        first: Program,
        stages: Sequence[Stage],
        replaced: Callable[[Sequence[Stage]], Sequence[Stage]] | None = None,
    ):
        whole = graph.whole
        self.graph = whole.with_ops(whole.ops)
        self.graph.held = first.graph.held
        self.first, self.stages, self._replaced = first, list(stages), replaced
        self.timings = first.timings
        self.states: Sequence[KVSpec] = whole.states
        self.recurrent: Sequence[RecurrentSpec] = whole.recurrent
        self.max_positions, self.needs_whole_input = whole.max_positions, whole.needs_whole_input
        self.has_encoder, self.has_hidden = whole.n_encoder > 0, whole.hidden is not None
        self._shifts = ShiftPlan(whole.ops, _no_weight)
        self._finalizer = weakref.finalize(self, _close, self.stages)

    @property
    def is_whole(self) -> bool:
        """False once a stage or the first one's weights are lost."""
        return self.first.is_whole and not any(stage.is_lost for stage in self.stages)

    def renew(self) -> None:
        """Replace the stages after one was lost.

        The new ones have no page: what was evaluated has to be evaluated again, by sequences without pages. Raises
        StageError if a stage cannot be replaced.
        """
        if self._replaced is None or not self.first.is_whole:
            raise StageError("no stage takes the place of a lost one")
        _close(self.stages)
        self.stages[:] = self._replaced(self.stages)

    def close(self) -> None:
        """End the stages: other callers can have them."""
        self._finalizer()

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return self._shifts.rope_variant(seq_len)

    def shift_keys(self, layer: int, keys: Floats, by: int, seq_len: int) -> Floats:
        """Raise InvalidRequestError: keys of other stages are not here."""
        raise InvalidRequestError("cached keys of a model on several machines cannot be moved to other positions")

    def load(self, tensors: Iterable[Tensor], file: ModelFile) -> Mapping[Tensor, Any]:
        """Raise InvalidRequestError: LoRA adapters have matrices of all stages."""
        raise InvalidRequestError("a model on several machines takes no LoRA adapters")

    def recompiled(self, graph: Graph, matrices: Mapping[Tensor, Any]) -> Program:
        """Raise InvalidRequestError, as `load` does."""
        raise InvalidRequestError("a model on several machines takes no LoRA adapters")

    def extended(self, graph: Graph, file: ModelFile) -> Program:
        """Raise InvalidRequestError: a head would need weights of the last stage."""
        raise InvalidRequestError("a model on several machines runs no multi-token-prediction head")

    @abc.abstractmethod
    def results(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> list[Floats]:
        """Compute a batch: one array of RESULTS, or two for `both`."""

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], *, hidden: bool = False
    ) -> Floats:
        """See `llamacli.engine.base.Program.forward`."""
        return self.results(tokens, spans, n_last, "hidden" if hidden else "logits")[0]

    def forward_with_hidden(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """See `llamacli.engine.base.Program.forward_with_hidden`."""
        logits, hidden = self.results(tokens, spans, n_last, "both")
        return logits, hidden

    def forward_in_pieces(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> Generator[None, None, Floats]:
        """See `llamacli.engine.base.Program.forward_in_pieces`; a batch is one piece."""
        rows = self.forward(tokens, spans, n_last)
        yield
        return rows

    def batch_of(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> StageBatch:
        """Batch for the other machines, with changes of pages."""
        log = spans[0].sequence.pool.log
        assert log is not None
        changes = [log.popleft() for _ in range(len(log))]
        return StageBatch.of(tokens, spans, n_last, result, np.array(changes, np.int64).reshape(-1, 5))


class StagedProgram(DividedProgram):
    """Program whose first stage is here.

    Batches may be in flight in as many stages as there are: `submit` returns when the first stage has computed its
    part. `piece` is the largest number of tokens of a batch. With experts it is that of other programs: of fewer
    tokens, each expert would have few, and read its weights as often.
    """

    def __init__(
        self,
        graphs: Sequence[StageGraph],
        first: Program,
        stages: Sequence[Stage],
        replaced: Callable[[Sequence[Stage]], Sequence[Stage]] | None = None,
    ):
        super().__init__(graphs[0], first, stages, replaced)
        self._n_vocab = self.graph.ops[-1].out.width
        self._widths = [[one.received_by(encodes=encodes) for encodes in (False, True)] for one in graphs[1:]]
        self._lock = threading.Lock()
        is_cut = not self.needs_whole_input and not self.has_encoder
        self.piece = _PIECE if is_cut and not any(isinstance(op, MoE) for op in self.graph.ops) else N_BATCH

    @property
    def n_stages(self) -> int:
        """Number of stages, the first one included."""
        return 1 + len(self.stages)

    def results(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> list[Floats]:
        """See DividedProgram."""
        return self.submit(tokens, spans, n_last, result).result()

    def submit(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> Future[list[Floats]]:
        """Compute a batch in the first stage, begin it in the next."""
        with self._lock:
            rows = self.first.forward(tokens, spans, [span.n for span in spans])
            batch = self.batch_of(tokens, spans, n_last, result)
            done: Future[list[Floats]] = Future()
            self._start(tuple(self.stages), 0, batch, rows, done)
        return done

    def _start(
        self, stages: Sequence[Stage], i: int, batch: StageBatch, received: Floats, done: Future[list[Floats]]
    ) -> None:
        """Begin a batch in a stage behind the first.

        It goes on to the next one when that is done, and never to those that `renew` brings meanwhile.
        """

        def next_stage(future: Future[list[Floats]]) -> None:
            error = future.exception() or self._fault(stages, i, batch, future.result())
            if error is not None:
                _end(stages, i, batch)
                done.set_exception(error)
            elif i + 1 == len(stages):
                done.set_result(future.result())
            else:
                self._start(stages, i + 1, batch, future.result()[0], done)

        # Only the last stage is asked for results; the others send all rows.
        asked = batch if i + 1 == len(stages) else _all_rows(batch)
        try:
            future = stages[i].start(asked, received)
        except Exception as error:
            _end(stages, i, batch)
            done.set_exception(error)
            return
        future.add_done_callback(next_stage)

    def _fault(self, stages: Sequence[Stage], i: int, batch: StageBatch, results: list[Floats]) -> StageError | None:
        """Error for results of a wrong shape."""
        encodes, n = bool(batch.spans["n_encoded"][0] > batch.spans["start"][0]), len(batch.tokens)
        n_last, hidden = int(batch.spans["n_last"].sum()), self.graph.hidden
        width = 0 if hidden is None else hidden.width
        if i + 1 < len(stages):
            expected = [(n, self._widths[i + 1][encodes])]
        elif batch.result == "both":
            expected = [(n_last, self._n_vocab), (n, width)]
        else:
            expected = [(n_last, width if batch.result == "hidden" else self._n_vocab)]
        if [result.shape for result in results] == expected and all(one.dtype == np.float32 for one in results):
            return None
        found = ", ".join(f"{one.dtype} {one.shape}" for one in results)
        return StageError(f"{stages[i].name}: it answered {found} instead of float32 {expected}")


def _end(stages: Sequence[Stage], i: int, batch: StageBatch) -> None:
    """Have the stages behind `i` follow a batch that failed there.

    If that one is lost, all are closed: other callers can have them.
    """
    if stages[i].is_lost:
        _close(stages)
    for stage in stages[i + 1 :]:
        try:
            stage.follow(batch.kv_type, batch.log)
        except StageError:
            continue  # it is lost, and the next batch says so


def _close(stages: Sequence[Stage]) -> None:
    for stage in stages:
        stage.close()


def _all_rows(batch: StageBatch) -> StageBatch:
    spans = batch.spans.copy()
    spans["n_last"] = spans["n"]
    return attrs.evolve(batch, spans=spans, result="logits")


def _no_weight(tensor: Tensor) -> npt.NDArray[Any]:
    raise AssertionError(f"{tensor.name} is not read here")

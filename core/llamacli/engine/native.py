"""Native engine: runs graphs as tables of compiled kernels.

A graph becomes a table of kernel steps, which a team of threads runs for every batch of tokens. `lowering` has the ops
append steps and packs their weights, `steps` gives the steps buffers and barriers; here the table is made and run.
Steps that are Python functions divide the table into segments.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from llamacli.engine.base import QuantMode, Timings, wanted_rows
from llamacli.engine.floats import modes_of
from llamacli.engine.lowering import StepTable, Watch
from llamacli.engine.packed_copies import PackedCopy, new_copy, open_copy, save_copy
from llamacli.engine.steps import assign_buffers, bind, place_barriers
from llamacli.engine.weights import PackedWeights, load_matrix, packed_bytes
from llamacli.errors import FileChangedError, InvalidRequestError, plugin_errors
from llamacli.graph import Graph, Tensor
from llamacli.inputs import Inputs
from llamacli.kernels.isa import available, isa
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ROW, RUN
from llamacli.kernels.matrix import Matrix
from llamacli.kernels.prefetch import prefetch_distance
from llamacli.kernels.team import STEP, Team, check_threads
from llamacli.kv import N_BATCH, KVType
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.loaders import ModelFile
from llamacli.ops.linear import fuse_residuals
from llamacli.ops.lowering import NO_LIMIT, Array, HostRows, Slot, Step, f32
from llamacli.ops.run import Span
from llamacli.ops.shift_plan import ShiftPlan
from llamacli.util.locking import fork_safe
from llamacli.util.settings import Prompts

_log = logging.getLogger(__name__)

_SLICE_WORK = 4e9
"""Multiplications after which a run returns to Python, so that Ctrl-C is handled within about a tenth of a second."""
_PIECE_WORK = 5e8
"""Multiplications of a piece of `forward_in_pieces`."""
_PIECE_ROWS = 96
"""Rows of whole tiles of every kernel, by which long steps are cut into pieces."""


class NativeEngine:
    """Engine of Numba kernels on several threads.

    `threads` defaults to the usable cores. `watch` is called with the input of each matrix product. `copy_key` names
    the packed copy of the one model that it compiles then; see `llamacli.engine.packed_copies`. It is opened in the
    background at once, for the first call of `compile`. `mapped` weights stay on disk in it. `prompts` is how tokens of
    prompts are multiplied: raises InvalidRequestError for tiles on a CPU without them.
    """

    def __init__(
        self,
        threads: int | None = None,
        watch: Watch | None = None,
        copy_key: str | None = None,
        prompts: Prompts = Prompts.REGISTERS,
        *,
        mapped: bool = False,
    ):
        if prompts is Prompts.TILES and isa() != "amx":
            raise InvalidRequestError(
                f"prompts 'tiles' needs AMX, permitted by the system, and this CPU runs {', '.join(available())}; "
                f"{isa()} is in use"
            )
        self._prompts = prompts
        self._threads, self._watch, self._copy_key, self._mapped = check_threads(threads), watch, copy_key, mapped
        self._opening: Future[PackedCopy | None] | None = None
        if copy_key:
            opener = ThreadPoolExecutor(1)
            with contextlib.suppress(RuntimeError):  # no thread can be started: `compile` opens it
                self._opening = opener.submit(self._open_copy, _shared_team(self._threads))
            opener.shutdown(wait=False)

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> NativeProgram:
        """Pack the graph's weights and lay out its steps.

        `mode` says how the weights are kept.
        """
        team = _shared_team(self._threads)
        opening, self._opening = self._opening, None
        copy = opening.result() if opening else self._open_copy(team)
        modes = modes_of(graph, mode)
        if copy is not None:
            try:
                return self._with_copy(graph, file, mode, modes, team, copy)
            except FileChangedError as error:  # found when its first matrices were used; it is deleted
                _log.warning("the packed copy is made again: %s", error)
        if self._copy_key and self._mapped:
            with new_copy(self._copy_key, file.path, packed_bytes(graph, file, modes)) as new:
                return self._program(graph, PackedWeights(file, modes, team, new_copy=new), mode, team)
        return self._with_copy(graph, file, mode, modes, team, None)

    def _with_copy(
        self,
        graph: Graph,
        file: ModelFile,
        mode: QuantMode,
        modes: Mapping[Tensor, QuantMode],
        team: Team,
        copy: PackedCopy | None,
    ) -> NativeProgram:
        weights = PackedWeights(file, modes, team, copy=copy)
        program = self._program(graph, weights, mode, team)
        if self._copy_key and not (copy and copy.complete):
            save_copy(self._copy_key, file.path, weights.copyable)
        return program

    def _program(self, graph: Graph, weights: PackedWeights, mode: QuantMode, team: Team) -> NativeProgram:
        return NativeProgram(graph, weights, mode, team, self._watch, self._prompts)

    def _open_copy(self, team: Team) -> PackedCopy | None:
        return open_copy(self._copy_key, self._threads, team.nodes, mapped=self._mapped) if self._copy_key else None


_teams: dict[int, Team] = {}
_teams_lock = fork_safe(threading.Lock())


def _shared_team(n_threads: int) -> Team:
    """Thread team of a size, shared by all models.

    Thus only one program uses the cores at a time.
    """
    with _teams_lock:
        if n_threads not in _teams:
            try:
                _teams[n_threads] = Team(n_threads)
            except RuntimeError as error:  # a limit of processes or memory; those started sleep, and are not used
                raise InvalidRequestError(
                    f"cannot start {n_threads} threads: {error}; give a smaller number of threads"
                ) from error
        return _teams[n_threads]


class NativeProgram:
    """Compiled graph: weights, buffers and step table.

    `forward` may be called from any thread; calls wait for one another. `buffers` are the memory of values between
    steps, which a run leaves as it is. With prompts by tiles, batches of prompts are those of a program of its own,
    over the same weights; `is_tiled` makes that one.
    """

    def __init__(
        self,
        graph: Graph,
        weights: PackedWeights,
        mode: QuantMode,
        team: Team,
        watch: Watch | None = None,
        prompts: Prompts = Prompts.REGISTERS,
        *,
        is_tiled: bool = False,
    ):
        self.graph, self._weights, self._mode, self.prompts = graph, weights, mode, prompts
        self._of_prompts: NativeProgram | None = None
        if prompts is Prompts.TILES:
            self._of_prompts = NativeProgram(graph, weights, mode, team, watch, is_tiled=True)
        graph = graph.with_ops(fuse_residuals(graph.ops))
        table = StepTable(graph, weights, team, watch, is_tiled=is_tiled)
        self.states: Sequence[KVSpec] = graph.states
        self.recurrent: Sequence[RecurrentSpec] = graph.recurrent
        self.max_positions, self.needs_whole_input = graph.max_positions, graph.needs_whole_input
        self.timings: Timings = Timings() if self._of_prompts is None else self._of_prompts.timings
        self._team, self._steps, self._tail = team, table.steps, table.tail
        self._prepares, self._jump_prepares, self._host_ops = table.prepares, table.jump_prepares, table.host_ops
        vectors = dict[Tensor, Array]()
        self._shifts = ShiftPlan(graph.ops, vectors.__getitem__)
        for tensor in self._shifts.tensors():
            vectors[tensor] = table.vector(tensor)  # loaded now: the file may be closed afterwards
        logits, self._n_batch = f32(graph.ops[-1].out), graph.n_batch or N_BATCH
        self._n_vocab, self._n_merged = logits.width, graph.n_merged
        passed = graph.passed and f32(graph.passed)
        self.buffers = assign_buffers(self._steps, self._n_batch, keep={logits, passed or logits})
        self._logits = self.buffers[logits]
        self._plugin_steps, self._alive = table.plugin_steps, list[list[Array]]()
        for step in self._steps:
            with self._errors_of(step):
                self._alive.append(bind(step, self.buffers))
        place_barriers(self._steps, self.buffers)
        self.has_encoder = graph.n_encoder > 0
        sent = graph.sent_by_encoder
        self._encoded = self.buffers[f32(sent)][:, : sent.width] if sent else np.empty((0, self._n_vocab), np.float32)
        self._encoder = _segments(self._steps, 0, table.decoder)
        self._body = _segments(self._steps, table.decoder, self._tail)
        self._to_logits = _segments(self._steps, self._tail, len(self._steps))
        self._whole = _segments(self._steps, table.decoder, len(self._steps))
        self._crossing = _crossing(self._steps, self._tail, self.buffers)
        self._output = _segments(self._steps, table.output, len(self._steps))
        self._crossing_output = _crossing(self._steps, table.output, self.buffers)
        self._result_is_hidden = table.hidden == graph.ops[-1].out
        self._to_hidden, self._hidden, self._hidden_width = self._find_hidden(table)
        self._passed = self.buffers[passed][:, : passed.width] if passed else self._hidden[:, : self._hidden_width]
        # The rows of a last step that mixes tokens are more than those that logits are wanted of.
        in_tail = self._tail < len(self._steps)
        self._writes_logits = _only_writer(self._steps, logits, self._logits) if in_tail else None
        self._run, self._rows = np.zeros(1, RUN), np.zeros(self._n_batch, ROW)
        self._run["rows"], self._run_address = self._rows.ctypes.data, self._run.ctypes.data
        self._run_fields = self._run.view(np.int64)  # of all fields, as of rows: setting one by name takes longer
        self._fields = self._rows.view(np.int64).reshape(self._n_batch, -1)
        self._reached, self._has_reported = 0, False
        self._work, self._work_seen = (
            np.array([getattr(step, name) for step in self._steps]) for name in ("work", "work_seen")
        )
        self._work_before, self._work_seen_before = (
            [0.0, *np.cumsum(work).tolist()] for work in (self._work, self._work_seen)
        )
        self._watch = weights.watch
        self._tables: dict[KVType, int] = {}
        self._table(KVType("f16", "f16"))
        kernels = ((step.kernel, step.params) for step in self._steps if isinstance(step.kernel, Kernel))
        self._run["ahead"] = prefetch_distance(team, kernels)
        self._shared = table.release()

    def _errors_of(self, step: Step) -> AbstractContextManager[None]:
        description = self._plugin_steps.get(step)
        return plugin_errors(description) if description else nullcontext()

    def load(self, tensors: Iterable[Tensor], file: ModelFile) -> Mapping[Tensor, Matrix]:
        """See `llamacli.engine.base.Program.load`."""
        mode = QuantMode.FP32 if self._mode is QuantMode.FP32 else QuantMode.AUTO
        return {tensor: load_matrix(tensor, file, mode, self._team) for tensor in tensors}

    def recompiled(self, graph: Graph, matrices: Mapping[Tensor, Matrix]) -> NativeProgram:
        """See `llamacli.engine.base.Program.recompiled`."""
        return NativeProgram(graph, self._weights.extended(matrices), self._mode, self._team, prompts=self.prompts)

    def extended(self, graph: Graph, file: ModelFile) -> NativeProgram:
        """See `llamacli.engine.base.Program.extended`."""
        weights = self._weights.of_file(file, modes_of(graph, self._mode))
        return NativeProgram(graph, weights, self._mode, self._team)

    def _find_hidden(self, table: StepTable) -> tuple[Sequence[tuple[int, int]], Array, int]:
        """Segments of the tail up to the output layer.

        With the buffer and width of its input. No segment, and a width of 0, if the output layer does not lie in the
        tail. Without an output layer they are those of the logits.
        """
        slot = None if table.hidden is None else f32(table.hidden)
        if self._result_is_hidden:
            return self._to_logits, self._logits, self._n_vocab
        if slot is None or slot not in self.buffers or table.output < self._tail:
            return [], self._logits, 0
        return _segments(self._steps, self._tail, table.output), self.buffers[slot], slot.width

    @property
    def is_whole(self) -> bool:
        """See `llamacli.engine.base.Program.is_whole`."""
        return self._watch is None or self._watch.is_whole

    @property
    def has_hidden(self) -> bool:
        """See `llamacli.engine.base.Program.has_hidden`."""
        return self._hidden_width > 0

    def shift_keys(self, layer: int, keys: Array, by: int, seq_len: int) -> Array:
        """See `llamacli.engine.base.Program.shift_keys`."""
        return self._shifts.shift(layer, keys, by, seq_len)

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return self._shifts.rope_variant(seq_len)

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], *, hidden: bool = False
    ) -> npt.NDArray[np.float32]:
        """See `llamacli.engine.base.Program.forward`; at most `n_batch` tokens of the graph."""
        if self._of_prompts is not None and spans[0].is_prompt:
            return self._of_prompts.forward(tokens, spans, n_last, hidden=hidden)
        is_hidden = hidden and not self._result_is_hidden
        with self._team.lock:
            started, n = time.perf_counter(), len(tokens)
            table, n_seen = self._place(tokens, spans)
            batch = HostRows(tokens, 0, n, spans)
            if self.has_encoder and spans[0].encodes:
                self._run_steps(table, self._encoder, batch, n_seen)
                rows = self._encoded[:n].copy()
            elif sum(n_last) == n and not is_hidden:  # all rows run through all steps, as in most decode steps
                logits = self._new_logits(0, n)
                self._run_steps(table, self._whole, batch, n_seen)
                if self._writes_logits is None:
                    logits[:] = self._logits[:n]
                rows = logits[:, : self._n_vocab]
            else:
                wanted = wanted_rows(spans, n_last, self._n_merged)
                self._run_steps(table, self._body, batch, n_seen)
                if is_hidden:
                    rows = self._run_to_hidden(table, batch, wanted, n_seen)
                else:
                    rows = self._run_to_logits(table, self._to_logits, self._crossing, batch, wanted, n_seen)
            self._end(started, n)
        return rows

    def forward_with_hidden(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """See `llamacli.engine.base.Program.forward_with_hidden`."""
        if self._of_prompts is not None and spans[0].is_prompt:
            return self._of_prompts.forward_with_hidden(tokens, spans, n_last)
        wanted = wanted_rows(spans, n_last)
        with self._team.lock:
            started, n = time.perf_counter(), len(tokens)
            table, n_seen = self._place(tokens, spans)
            batch = HostRows(tokens, 0, n, spans)
            self._run_steps(table, [*self._body, *self._to_hidden], batch, n_seen)
            states = self._passed[:n].copy()
            logits = self._run_to_logits(table, self._output, self._crossing_output, batch, wanted, n_seen)
            self._end(started, n)
        return logits, states

    def forward_in_pieces(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> Generator[None, None, npt.NDArray[np.float32]]:
        """See `llamacli.engine.base.Program.forward_in_pieces`."""
        wanted, n = wanted_rows(spans, n_last, self._n_merged), len(tokens)
        with self._team.lock:
            table, n_seen = self._place(tokens, spans)
        batch = HostRows(tokens, 0, n, spans)
        yield from self._run_pieces(table, self._body, batch, n_seen)
        rows = self._gather(batch, wanted, self._crossing)
        logits = self._new_logits(rows.first, rows.stop)
        yield from self._run_pieces(table, self._to_logits, rows, n_seen)
        if self._writes_logits is None:
            logits[:] = self._logits[rows.first : rows.stop]
        logits = logits[:, : self._n_vocab]
        if self._watch is not None:
            self._watch.expect_whole()
        return logits if len(logits) == len(wanted) else logits[wanted - rows.first]

    def _run_pieces(
        self, table: int, segments: Sequence[tuple[int, int]], rows: HostRows, n_seen: int
    ) -> Generator[None, None, None]:
        """Run segments of the table; yields after each piece.

        Other programs may use the threads between the pieces, but nothing this program.
        """
        first, last, run = rows.first, rows.stop, self._run
        work = (last - first) * (self._work + n_seen * self._work_seen)

        def team_run(start: int, stop: int, first: int, last: int) -> None:
            with self._team.lock:
                run["n_rows"], run["first_row"] = last, first
                self._team.run(table, start, stop, self._run_address)

        for start, stop in segments:
            if self._steps[start].host is not None:
                with self._team.lock:
                    self._run_host(self._steps[start], rows)
                continue
            done = 0.0
            for i in range(start, stop):
                done += work[i]
                if work[i] > _PIECE_WORK:
                    if start < i:
                        team_run(start, i, first, last)
                        yield
                    n_rows = max(1, int((last - first) * _PIECE_WORK / work[i]) // _PIECE_ROWS) * _PIECE_ROWS
                    for edge in range(first, last, n_rows):
                        team_run(i, i + 1, edge, min(last, edge + n_rows))
                        yield
                elif done > _PIECE_WORK:
                    team_run(start, i + 1, first, last)
                    yield
                else:
                    continue
                start, done = i + 1, 0.0
            if start < stop:
                team_run(start, stop, first, last)

    def _run_to_hidden(
        self, table: int, batch: HostRows, wanted: npt.NDArray[np.intp], n_seen: int
    ) -> npt.NDArray[np.float32]:
        """Run the last part up to the output layer; what that reads.

        Only the rows wanted.
        """
        if not len(wanted):
            return np.empty((0, self._hidden_width), np.float32)
        rows = self._gather(batch, wanted, self._crossing)
        self._run_steps(table, self._to_hidden, rows, n_seen)
        hidden = self._hidden[rows.first : rows.stop, : self._hidden_width].copy()
        return hidden if len(hidden) == len(wanted) else hidden[wanted - rows.first]

    def _run_to_logits(
        self,
        table: int,
        segments: Sequence[tuple[int, int]],
        crossing: Sequence[Array] | None,
        batch: HostRows,
        wanted: npt.NDArray[np.intp],
        n_seen: int,
    ) -> npt.NDArray[np.float32]:
        """Run the last part, or the output layer alone; the logits.

        Only the rows wanted. `segments` are those of the part, `crossing` the buffers that it reads.
        """
        if not len(wanted):
            return np.empty((0, self._n_vocab), np.float32)
        rows = self._gather(batch, wanted, crossing)
        logits = self._new_logits(rows.first, rows.stop)
        self._run_steps(table, segments, rows, n_seen)
        if self._writes_logits is None:
            logits[:] = self._logits[rows.first : rows.stop]
        logits = logits[:, : self._n_vocab]
        return logits if len(logits) == len(wanted) else logits[wanted - rows.first]

    def _gather(self, batch: HostRows, wanted: npt.NDArray[np.intp], crossing: Sequence[Array] | None) -> HostRows:
        """Move the rows wanted to the front of the batch.

        Unless they are its last ones. The rows that the last part shall compute; where rows of a slot cannot be moved,
        those between them too.
        """
        n, first = batch.stop, int(wanted[0])
        if len(wanted) == n - first or crossing is None:
            return HostRows(batch.tokens[first:], first, n, batch.spans)
        for buffer in crossing:
            buffer[: len(wanted)] = buffer[wanted]
        self._rows[: len(wanted)] = self._rows[wanted]
        ends = np.cumsum([span.n for span in batch.spans])
        spans = []
        for row in wanted.tolist():
            i = int(np.searchsorted(ends, row, side="right"))
            span = batch.spans[i]
            at = row - int(ends[i]) + span.n
            spans.append(span.part(at, at + 1))
        return HostRows(batch.tokens[wanted], 0, len(wanted), spans)

    def _run_steps(self, table: int, segments: Sequence[tuple[int, int]], rows: HostRows, n_seen: int) -> None:
        first, last, run = rows.first, rows.stop, self._run_fields
        for start, stop in segments:
            if self._steps[start].host is not None:
                self._run_host(self._steps[start], rows)
                continue
            run[0], run[1] = last, first
            work_of_row = self._work_before[stop] - self._work_before[start]
            work_of_row += n_seen * (self._work_seen_before[stop] - self._work_seen_before[start])
            if (last - first) * work_of_row <= _SLICE_WORK:  # a lone token, mostly
                self._team.run(table, start, stop, self._run_address)
            else:
                self._run_slices(table, start, stop, first, last, n_seen)

    def _new_logits(self, first: int, n: int) -> npt.NDArray[np.float32]:
        """Allocate the logits of rows `first` to n - 1.

        The last kernel writes to them directly if it can.
        """
        row_bytes = self._logits.strides[0]
        logits = np.empty((n - first, row_bytes // 4), np.float32)
        if self._writes_logits is None:
            return logits[:, : self._logits.shape[1]]
        self._writes_logits.params["out"] = logits.ctypes.data - first * row_bytes
        return logits

    def _place(self, tokens: npt.NDArray[np.int32], spans: Sequence[Span]) -> tuple[int, int]:
        """Fill in the row of each token.

        Extends the tables that depend on positions. Returns the address of the table of steps, and the largest number
        of tokens that one of them attends to.
        """
        if len(tokens) > self._n_batch:
            raise ValueError(f"{len(tokens)} tokens are more than the {self._n_batch} of a batch")
        ids, row, n_seen, reach = tokens.tolist(), 0, 0, 0
        jumps: list[npt.NDArray[np.int32]] = []
        for span in spans:
            sequence, start, n = span.sequence, span.start, span.n
            stop, behind = start + n, span.n_behind if self.has_encoder else 0
            scales = 0 if span.adapter_scales is None else span.adapter_scales.ctypes.data
            shared = sequence.address, sequence.seq_len, stop, 0, 0
            if n == 1:
                self._fields[row] = start, start - behind, *shared, ids[row], 0, scales, behind
            else:
                fields, cells = self._fields[row : row + n], np.arange(start, stop)
                fields[:, 0], fields[:, 1] = cells, cells - behind
                fields[:, 2:7], fields[:, 7], fields[:, 8:] = shared, tokens[row : row + n], (0, scales, behind)
            n_seen = max(n_seen, stop)
            if span.inputs is not None:
                rows = self._rows[row : row + n]
                _place_inputs(rows, start, span.inputs, jumps)
                reach = max(reach, 1 + int(rows["position"][rows["jump"] == 0].max(initial=0)))
            row += n
        if max(n_seen, reach) > self._reached:
            self._reached = min([prepare(max(n_seen, reach)) for prepare in self._prepares], default=NO_LIMIT)
        if jumps:
            for prepare_jumps in self._jump_prepares:
                prepare_jumps(np.concatenate(jumps))
        kv_type = spans[0].sequence.pool.layout.kv_type
        return self._tables.get(kv_type) or self._table(kv_type), n_seen

    def _run_host(self, step: Step, rows: HostRows) -> None:
        """Run a host step, and time it.

        Time is counted for ops without kernels.
        """
        assert step.host is not None
        if self._watch is not None:
            self._watch.expect_whole()  # it may send what was computed to other nodes
        started = time.perf_counter()
        step.host(rows, self.buffers.__getitem__)
        if step in self._host_ops:
            times, description = self.timings.host, self._host_ops[step]
            times[description] = times.get(description, 0.0) + time.perf_counter() - started

    def _end(self, started: float, n_tokens: int) -> None:
        """Add the time of a run, and warn once about host ops.

        The first run with such ops logs their share of the time. Raises FileChangedError if the weights were cut.
        """
        if self._watch is not None:
            self._watch.expect_whole()
        self.timings.total, self.timings.batch_share = self.timings.total + time.perf_counter() - started, 0.0
        if self._has_reported or not self.timings.host:
            return
        self._has_reported = True
        verbs = sorted({description.partition(",")[0] for description in self.timings.host})
        _log.warning(
            "%s: no kernel, so NumPy computes it: %.0f %% of the time of the first %d tokens (see docs/plugins.md)",
            "; ".join(verbs),
            100 * sum(self.timings.shares().values()),
            n_tokens,
        )

    def _run_slices(self, table: int, start: int, stop: int, first: int, last: int, n_seen: int) -> None:
        """Run steps for rows `first` to `last` - 1.

        In slices short enough for Ctrl-C.
        """
        run = self._run
        work, done = (last - first) * (self._work + n_seen * self._work_seen), 0.0
        for i in (np.flatnonzero(work[start:stop]) + start).tolist():
            done += work[i]
            if done <= _SLICE_WORK:
                continue
            if self._work_seen[i] and work[i] > _SLICE_WORK:  # one step that is long on its own, row by row
                if start < i:
                    self._team.run(table, start, i, self._run_address)
                n_slices = min(last - first, math.ceil(work[i] / _SLICE_WORK))
                edges = np.linspace(first, last, n_slices + 1).astype(np.int64)
                for run["first_row"], run["n_rows"] in itertools.pairwise(edges):
                    self._team.run(table, i, i + 1, self._run_address)
                run["first_row"], run["n_rows"] = first, last
            else:
                self._team.run(table, start, i + 1, self._run_address)
            start, done = i + 1, 0.0
            self.timings.batch_share = start / len(self._steps)
        if start < stop:
            self._team.run(table, start, stop, self._run_address)

    def _table(self, kv_type: KVType) -> int:
        """Address of the table of steps, by KV cache type.

        Kernels are compiled here, when their addresses are read.
        """
        table = np.zeros(len(self._steps), STEP)
        for entry, step in zip(table, self._steps, strict=True):
            if step.kernel is not None:
                with self._errors_of(step):
                    kernel = step.kernel if isinstance(step.kernel, Kernel) else step.kernel(kv_type)
                    entry["function"], entry["args"] = kernel.address, step.params.ctypes.data
                entry["barrier"] = step.barrier
        self._alive.append([table])
        self._tables[kv_type] = table.ctypes.data
        return table.ctypes.data


def _place_inputs(rows: Array, start: int, inputs: Inputs, jumps: list[npt.NDArray[np.int32]]) -> None:
    """Fill in embeddings, positions and bidirectional spans.

    Positions that the tables of text lack are appended to `jumps`.
    """
    if inputs.embeddings is not None:
        table = inputs.embeddings
        rows["given"][inputs.rows] = table.ctypes.data + table.strides[0] * np.arange(len(table))
    for first, stop in inputs.spans:
        rows["n_ahead"][first:stop] = np.arange(stop - first)[::-1]
    if inputs.positions is None:
        return
    rows["position"] = inputs.positions[:, 0]
    is_text = rows["position"] < rows["seq_len"]
    if inputs.positions.shape[1] > 1:
        time, height, width, extra = inputs.positions.T
        is_text &= (time == height) & (time == width) & (extra == 0)
    others = np.flatnonzero(~is_text)
    if len(others):
        rows["jump"][others] = 1 + sum(map(len, jumps)) + np.arange(len(others))
        jumps.append(inputs.positions[others])


def _segments(steps: Sequence[Step], start: int, stop: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for i in range(start, stop):
        if ranges and ranges[-1][1] == i and steps[i].host is None and steps[i - 1].host is None:
            ranges[-1] = ranges[-1][0], i + 1
        else:
            ranges.append((i, i + 1))
    return ranges


def _crossing(steps: Sequence[Step], tail: int, buffers: Mapping[Slot, Array]) -> list[Array] | None:
    """Buffers that the steps from `tail` on read and earlier ones write.

    None if rows of one of them cannot be moved, or if there is no step from `tail` on.
    """
    if tail == len(steps):
        return None
    written, found = set[Slot](), dict[int, Array]()
    for step in steps[tail:]:
        for slot in step.reads:
            if slot in buffers and slot not in written:
                if slot.slots:
                    return None
                found[id(buffers[slot])] = buffers[slot]
        written |= {*step.writes}
    return list(found.values())


def _only_writer(steps: Sequence[Step], slot: Slot, buffer: Array) -> Step | None:
    """Last step, if no other writes the slot; else None.

    It must write it by its parameter `out`. Where it is None, logits are copied from the buffer.
    """
    last = steps[-1]
    if last.host or [step for step in steps if slot in step.writes] != [last] or "out" not in (last.record.names or ()):
        return None
    return last if int(last.params["out"][0]) == buffer.ctypes.data else None

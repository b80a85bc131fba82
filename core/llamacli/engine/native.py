"""The fast engine: a graph becomes a table of kernel steps, which a team of threads walks for every batch of tokens.

`lowering` turns ops into steps and packs their weights, `steps` gives the steps buffers and barriers; here the table is
made and walked.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.engine.base import QuantMode, Span
from llamacli.engine.lowering import Lowering
from llamacli.engine.steps import Array, assign_buffers, bind, f32, place_barriers, stride
from llamacli.engine.turning import Turns
from llamacli.kernels.jit import ROW, RUN, Kernel
from llamacli.kernels.team import STEP, Team, check_threads
from llamacli.kv import N_BATCH, KVType
from llamacli.kv.layout import KVSpec
from llamacli.loaders import ModelFile

_SLICE_WORK = 4e9
"""Multiplications after which a walk returns to Python, so that Ctrl-C is heard within about a tenth of a second."""


class NativeEngine:
    """Compiles graphs to programs of Numba kernels, run by `threads` threads (default: the usable cores)."""

    def __init__(self, threads: int | None = None):
        self._threads = check_threads(threads)

    def compile(self, graph: g.Graph, file: ModelFile, mode: QuantMode) -> NativeProgram:
        """Pack the weights that the graph reads, as `mode` says, and lay out its steps."""
        return NativeProgram(graph, file, mode, _shared_team(self._threads))


_teams: dict[int, Team] = {}
_teams_lock = threading.Lock()


def _shared_team(n_threads: int) -> Team:
    """The team of this size; models share it, so that only one walk uses the cores at a time."""
    with _teams_lock:
        if n_threads not in _teams:
            _teams[n_threads] = Team(n_threads)
        return _teams[n_threads]


class NativeProgram:
    """A graph laid out as steps. `forward` may be called from any thread; calls take turns."""

    def __init__(self, graph: g.Graph, file: ModelFile, mode: QuantMode, team: Team):
        lowered = Lowering(graph, file, mode, team)
        self.states: Sequence[KVSpec] = graph.states
        self._team, self._steps, self._tail = team, lowered.steps, lowered.tail
        self._ropes, self._matrices = list(lowered.ropes.values()), lowered.matrices
        self._turns = Turns(graph, lowered.vector)
        logits = graph.ops[-1].out
        self._n_vocab = logits.width
        buffers = assign_buffers(lowered.steps, [f32(op.out) for op in lowered.embeds], keep=f32(logits))
        self._logits_stride = stride(buffers[f32(logits)])
        self._embeds = [(lowered.matrices[op.table], buffers[f32(op.out)]) for op in lowered.embeds]
        self._alive = [bind(step, buffers) for step in lowered.steps]
        place_barriers(lowered.steps, buffers)
        self._run, self._rows = np.zeros(1, RUN), np.zeros(N_BATCH, ROW)
        self._run["rows"] = self._rows.ctypes.data
        self._work, self._work_seen = (
            np.array([getattr(step, name) for step in self._steps]) for name in ("work", "work_seen")
        )
        self._tables: dict[KVType, Array] = {}
        self._table(KVType("f16", "f16"))

    def shift_keys(self, layer: int, keys: Array, by: int, seq_len: int) -> Array:
        """See `llamacli.engine.base.Program.shift_keys`."""
        return self._turns.shift_keys(layer, keys, by, seq_len)

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return self._turns.rope_variant(seq_len)

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], *, all_logits: bool
    ) -> npt.NDArray[np.float32]:
        """See `llamacli.engine.base.Program.forward`; at most N_BATCH tokens."""
        n = len(tokens)
        if n > N_BATCH:
            raise ValueError(f"{n} tokens are more than the {N_BATCH} of a batch")
        last = np.cumsum([span.n for span in spans]) - 1
        # The last part is computed for a range of rows: those that are wanted, and any between them.
        first = 0 if all_logits else int(last[0])
        row_bytes = self._logits_stride
        with self._team.lock:
            table = self._table(spans[0].sequence.kv_type)
            self._place(spans)
            for matrix, buffer in self._embeds:
                buffer[:n, : matrix.shape[1]] = matrix.rows(tokens)
            logits = np.empty((n - first, row_bytes // 4), np.float32)
            self._steps[-1].params["out"] = logits.ctypes.data - first * row_bytes
            n_seen = max(span.start + span.n for span in spans)
            self._walk(table, 0, self._tail, 0, n, n_seen)
            self._walk(table, self._tail, len(self._steps), first, n, n_seen)
        return logits[:, : self._n_vocab] if all_logits else logits[last - first, : self._n_vocab]

    def _place(self, spans: Sequence[Span]) -> None:
        """Say of each row where it stands."""
        row = 0
        for span in spans:
            rows = self._rows[row : row + span.n]
            rows["cell"] = rows["position"] = np.arange(span.start, span.start + span.n)
            rows["kv"], rows["seq_len"] = span.sequence.addresses.ctypes.data, span.sequence.seq_len
            row += span.n
        for rope in self._ropes:
            rope.reach(max(span.start + span.n for span in spans))

    def _walk(self, table: Array, start: int, stop: int, first: int, last: int, n_seen: int) -> None:
        """Walk steps for rows `first` to `last` - 1, in slices short enough for Ctrl-C."""
        run = self._run
        run["first_row"], run["n_rows"] = first, last
        work = (last - first) * (self._work + n_seen * self._work_seen)
        if work[start:stop].sum() <= _SLICE_WORK:  # a lone token, mostly
            self._team.run(table, start, stop, run)
            return
        done = 0.0
        for i in (np.flatnonzero(work[start:stop]) + start).tolist():
            done += work[i]
            if done <= _SLICE_WORK:
                continue
            if self._work_seen[i] and work[i] > _SLICE_WORK:  # one step that is long on its own, row by row
                if start < i:
                    self._team.run(table, start, i, run)
                n_slices = min(last - first, math.ceil(work[i] / _SLICE_WORK))
                edges = np.linspace(first, last, n_slices + 1).astype(np.int64)
                for run["first_row"], run["n_rows"] in itertools.pairwise(edges):
                    self._team.run(table, i, i + 1, run)
                run["first_row"], run["n_rows"] = first, last
            else:
                self._team.run(table, start, i + 1, run)
            start, done = i + 1, 0.0
        if start < stop:
            self._team.run(table, start, stop, run)

    def _table(self, kv_type: KVType) -> Array:
        """The steps as the team walks them; kernels are compiled here, when their addresses are asked for."""
        if kv_type not in self._tables:
            table = np.zeros(len(self._steps), STEP)
            for entry, step in zip(table, self._steps, strict=True):
                kernel = step.kernel if isinstance(step.kernel, Kernel) else step.kernel(kv_type)
                entry["function"], entry["args"] = kernel.address, step.params.ctypes.data
                entry["barrier"] = step.barrier
            self._tables[kv_type] = table
        return self._tables[kv_type]

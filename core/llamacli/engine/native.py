"""The fast engine: a graph becomes a table of kernel steps, which a team of threads walks for every batch of tokens.

Weights are packed once, at load, into the layout that the kernels read. Laying out goes in three passes: `_Lowering`
turns ops into steps that name what they read and write; buffers are given to these names, each for as long as it is
needed; and barriers are put where a step needs what another thread wrote, or overwrites what another may still read.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.engine.base import QuantMode, Span
from llamacli.engine.weights import Matrix, load_matrix, load_rows
from llamacli.kernels import attention, elementwise, experts
from llamacli.kernels.formats import ACTIVATION, ACTIVATION_BLOCK, FLOAT_FORMS, INTEGER_FORMS, ROWS
from llamacli.kernels.jit import ROW, RUN, Kernel
from llamacli.kernels.linear import LINEAR, linear
from llamacli.kernels.team import STEP, Team, check_threads
from llamacli.kv import N_BATCH, KVType
from llamacli.loaders import ModelFile
from llamacli.rope import Rope

_log = logging.getLogger(__name__)

_SLICE_WORK = 4e9
"""Multiplications after which a walk returns to Python, so that Ctrl-C is heard within about a tenth of a second."""

MAX_TOKENS = 1 << 40
"""Stands for no bound: more tokens than there can be."""

Array = npt.NDArray[Any]


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


@attrs.frozen
class _Slot:
    """A name for a buffer: a value in one form of activations, or a kernel's own scratch of a NumPy type.

    With `slots`, each row of the batch has that many, and all of them lie together from the buffer's start.
    """

    owner: object
    form: str
    width: int
    slots: int = 0

    @property
    def kind(self) -> tuple[str, int, int]:
        """Buffers of the same kind can stand in for one another."""
        return self.form, self.width, self.slots

    def allocate(self) -> Array:
        """A buffer; the padding of float rows is zero and stays so, for no kernel writes anything else there."""
        n_rows, n_blocks = N_BATCH * max(1, self.slots), -(-self.width // ACTIVATION_BLOCK)
        # Rows lie a little further apart than they need to: at distances of 4096 bytes they would fight for the same
        # lines of the first-level cache.
        if self.form in FLOAT_FORMS:
            width = n_blocks * ACTIVATION_BLOCK
            return np.zeros((n_rows, width + 16), np.float32)[:, :width]
        if self.form in INTEGER_FORMS:
            return np.zeros((n_rows, n_blocks + 1), ACTIVATION)[:, :n_blocks]
        return np.zeros((n_rows, self.width), self.form)


Bind = Callable[[Callable[[_Slot], Array]], dict[str, Any]]


@attrs.define(eq=False)
class _Step:
    """One entry of the table. `bind` gives its parameters once buffers are known; `kernel` may depend on the cache.

    `follows` is the step before it whose work is divided in the same way: what that one wrote, the same thread reads.
    `work` is multiplications a row, `work_seen` those for each token that the row sees; `work_unit` is how many
    elements of a row threads are given at a time.
    """

    kernel: Kernel | Callable[[KVType], Kernel]
    record: np.dtype[np.void]
    reads: tuple[_Slot, ...]
    writes: tuple[_Slot, ...]
    bind: Bind
    follows: _Step | None = None
    work: float = 0.0
    work_seen: float = 0.0
    work_unit: int = 0
    barrier: bool = False
    params: Array = attrs.field(init=False)


class _RopeTable:
    """Cosines and sines of one RoPE variant for all positions so far, and the parameters that point to them."""

    def __init__(self, rope: Rope, factors: Array | None, prefix: str = ""):
        self._rope, self._factors = rope, factors
        self._fields = f"{prefix}cos", f"{prefix}sin"
        self._tables: list[Array] = [np.empty((0, rope.n_dims // 2), np.float32)] * 2
        self.steps: list[_Step] = []

    def reach(self, n: int) -> None:
        """Make sure that the first n positions are there."""
        known = len(self._tables[0])
        if n <= known:
            return
        more = self._rope.table(known, max(n, 2 * known, 256) - known, self._factors)
        self._tables = [np.concatenate(parts) for parts in zip(self._tables, more, strict=True)]
        for step in self.steps:
            for field, table in zip(self._fields, self._tables, strict=True):
                step.params[field] = table.ctypes.data


class _Lowering:
    """Ops to steps. `tail` is the first step after the last attention: its rows depend on no others."""

    def __init__(self, graph: g.Graph, file: ModelFile, mode: QuantMode, team: Team):
        self._file, self._mode, self._team, self._states = file, mode, team, graph.states
        self._routers, self._repacked = graph.routers(), set[int]()
        self.matrices: dict[g.Tensor, Matrix] = {}
        self._vectors: dict[g.Tensor, Array] = {}
        self.ropes: dict[tuple[Rope, g.Tensor | None, str], _RopeTable] = {}
        self.steps: list[_Step] = []
        self.tail = 0
        self._done: set[_Slot] = set()
        self._zeros = np.zeros(max(op.out.width for op in graph.ops) + ROWS, np.float32)
        self._scratch: dict[int, Array] = {}
        self.embeds = [op for op in graph.ops if isinstance(op, g.Embed)]

        uses = Counter(value for op in graph.ops for value in op.inputs())
        sums = {}
        for op in graph.ops:
            if isinstance(op, g.Add):
                for product, other in ((op.b, op.a), (op.a, op.b)):
                    if uses[product] == 1 and product not in sums:
                        sums[product] = (op, other)
                        break
        made = {op.out: op for op in graph.ops}
        # A product that only goes into a sum is added where it is computed.
        self._residual = {
            op: added for value, added in sums.items() if isinstance(op := made[value], g.Linear)
        }  # fmt: skip
        fused = {added[0] for added in self._residual.values()}
        for op in graph.ops:
            if op not in fused:
                self._lower(op)
            if isinstance(op, g.Attention):
                self.tail = len(self.steps)

    def _lower(self, op: g.Op) -> None:
        match op:
            case g.Embed():
                self._matrix(op.table)  # rows are looked up before the walk
            case g.RmsNorm():
                self._rms_norm(op)
            case g.Linear():
                add, other = self._residual.get(op, (op, None))
                self._linear(_f32(op.x), op.weight, _f32(add.out), op.bias, _f32(other) if other else None)
            case g.Rotate():
                self._rotate(op)
            case g.Store():
                self._store(op)
            case g.Attention():
                self._attention(op)
            case g.Gated():
                self._gated(_f32(op.gate), _f32(op.up), _f32(op.out), op.activation)
            case g.SigmoidGate():
                self._sigmoid_gate(op)
            case g.Add():
                self._by_blocks(elementwise.add, elementwise.ADD, {"a": op.a, "b": op.b}, op.out)
            case g.Scale():
                factor = op.factor * (float(self._vector(op.by)[0]) if op.by else 1.0)
                self._by_blocks(elementwise.scale, elementwise.SCALE, {"x": op.x}, op.out, factor=factor)
            case g.Softcap():
                self._by_blocks(elementwise.softcap, elementwise.SCALE, {"x": op.x}, op.out, factor=op.cap)
            case g.Columns():
                self._columns(op)
            case g.MoE():
                self._moe(op)
            case _:
                raise TypeError(f"no kernel for {type(op).__name__}")

    # --- weights -----------------------------------------------------------------------------------------------------

    def _matrix(self, tensor: g.Tensor) -> Matrix:
        if tensor not in self.matrices:
            exact = tensor.name in self._routers or not tensor.is_matrix
            mode = QuantMode.FP32 if exact else self._mode
            self.matrices[tensor] = load_matrix(tensor, self._file, mode, self._team)
            self._file.release(tensor.name)
            self._say_repacked(tensor, self.matrices[tensor])
        return self.matrices[tensor]

    def _say_repacked(self, tensor: g.Tensor, matrix: Matrix) -> None:
        source = self._file.tensors[tensor.name].type
        if self._mode is QuantMode.AUTO and matrix.kind != source and source not in self._repacked and tensor.is_matrix:
            self._repacked.add(source)
            _log.warning("%s has no kernel of its own: such tensors are kept as %s", source.name, matrix.kind.name)

    def _vector(self, tensor: g.Tensor) -> Array:
        if tensor not in self._vectors:
            self._vectors[tensor] = load_rows(tensor, self._file)
        return self._vectors[tensor]

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step(
        self,
        kernel: Kernel | Callable[[KVType], Kernel],
        record: np.dtype[np.void],
        reads: Sequence[_Slot],
        writes: Sequence[_Slot],
        bind: Bind,
        **more: Any,
    ) -> _Step:
        step = _Step(kernel, record, tuple(reads), tuple(writes), bind, **more)
        self.steps.append(step)
        return step

    def _rms_norm(self, op: g.RmsNorm) -> None:
        x, out = _f32(op.x), _f32(op.out)
        weight = self._vector(op.weight) if op.weight else np.ones(op.head_dim + ROWS, np.float32)
        self._step(
            elementwise.rms_norm,
            elementwise.RMS_NORM,
            [x],
            [out],
            lambda at: {
                "x": at(x), "out": at(out), "weight": weight, "stride": _stride(at(x)), "head_dim": op.head_dim,
                "n_heads": x.width // op.head_dim, "eps": op.eps,
            },
            work_unit=op.head_dim,
        )  # fmt: skip

    def _by_blocks(
        self, kernel: Kernel, record: np.dtype[np.void], inputs: dict[str, g.Value], result: g.Value, **more: float
    ) -> None:
        """A step that does the same to every element, in blocks of 32."""
        slots, out = {name: _f32(value) for name, value in inputs.items()}, _f32(result)
        self._step(
            kernel,
            record,
            list(slots.values()),
            [out],
            lambda at: {
                **{name: at(slot) for name, slot in slots.items()}, "out": at(out), "stride": _stride(at(out)),
                "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK, **more,
            },
        )  # fmt: skip

    def _rounded(self, x: _Slot, form: str) -> _Slot:
        """A slot in the form that weights take, computed once, by the threads that computed it if that can be."""
        if form == x.form:
            return x
        out = attrs.evolve(x, form=form)
        if out not in self._done:
            made = next((step for step in reversed(self.steps) if x in step.writes), None)
            by_row = made is not None and made.work_unit == x.width
            whole_blocks = elementwise.FORMS[form].width == ACTIVATION_BLOCK
            aligned = by_row or (made is not None and made.work_unit == ACTIVATION_BLOCK and whole_blocks)
            self._step(
                elementwise.round_activations(form),
                elementwise.ROUND,
                [x],
                [out],
                lambda at: {
                    "x": at(x), "x_stride": _stride(at(x)), "out": at(out), "out_stride": _stride(at(out)),
                    "width": at(x).shape[1], "by_row": by_row, "slots": x.slots,
                },
                follows=made if aligned else None,
            )  # fmt: skip
            self._done.add(out)
        return out

    def _linear(
        self, x: _Slot, tensor: g.Tensor, out: _Slot, bias: g.Tensor | None = None, residual: _Slot | None = None,
        starts: _Slot | None = None,
    ) -> None:  # fmt: skip
        matrix = self._matrix(tensor)
        biases = self._vector(bias) if bias else self._zeros
        bias_stride = _stride(biases) if biases.ndim > 1 else 0
        source = self._rounded(x, matrix.packing.activation)
        n_groups, n_tiles, n_blocks, _ = matrix.packed.shape
        self._step(
            linear(matrix.kind),
            LINEAR,
            [slot for slot in (source, residual, starts) if slot],
            [out],
            lambda at: {
                "weight": matrix.packed, "tile_bytes": matrix.packed[0, 0].nbytes, "n_tiles": n_tiles,
                "n_blocks": n_blocks, "x": at(source), "x_stride": _stride(at(source)), "out": at(out),
                "out_stride": _stride(at(out)), "bias": biases, "bias_stride": bias_stride,
                "residual": at(residual) if residual else 0, "n_groups": n_groups,
                "starts": at(starts) if starts else 0,
            },
            work=float(matrix.shape[0] * matrix.shape[1] * max(1, x.slots)),
        )  # fmt: skip

    def _rotate(self, op: g.Rotate) -> None:
        rope, x, out = op.rope, _f32(op.x), _f32(op.out)
        first_step, second = (2, 1) if rope.interleaved else (1, rope.n_dims // 2)
        made = next((step for step in reversed(self.steps) if x in step.writes), None)
        step = self._step(
            elementwise.rotate,
            elementwise.ROTATE,
            [x],
            [out],
            lambda at: {
                "x": at(x), "out": at(out), "stride": _stride(at(x)), "n_heads": x.width // op.head_dim,
                "head_dim": op.head_dim, "n_dims": rope.n_dims, "first_step": first_step, "second": second,
                "long_from": rope.n_ctx_orig + 1 if op.long_factors else MAX_TOKENS,
            },
            follows=made if made is not None and made.work_unit == op.head_dim else None,
        )  # fmt: skip
        tables = {"": op.factors} | ({"long_": op.long_factors} if op.long_factors else {})
        for prefix, factors in tables.items():
            key = (rope, factors, prefix)
            if key not in self.ropes:
                divisors = self._vector(factors)[: rope.n_dims // 2] if factors else None
                self.ropes[key] = _RopeTable(rope, divisors, prefix)
            self.ropes[key].steps.append(step)

    def _store(self, op: g.Store) -> None:
        k, v, state = _f32(op.k), _f32(op.v), self._states[op.layer]
        made = next((step for step in reversed(self.steps) if k in step.writes), None)
        self._step(
            attention.store_kv,
            attention.STORE,
            [k, v],
            [_Slot(op.layer, "cache", 0)],
            lambda at: {
                "k": at(k), "v": at(v), "stride": _stride(at(k)), "layer": op.layer, "n_head_kv": state.n_head_kv,
                "head_dim": state.head_dim,
            },
            follows=made if made is not None and made.kernel is elementwise.rotate else None,
        )  # fmt: skip

    def _attention(self, op: g.Attention) -> None:
        q, out, state = _f32(op.q), _f32(op.out), self._states[op.layer]
        size = attention.scratch_bytes(op.head_dim)
        scratch = self._scratch.setdefault(size, np.zeros((self._team.n_threads, size // 4), np.float32))
        sinks = self._vector(op.sinks) if op.sinks else 0
        n_head = q.width // op.head_dim
        self._step(
            attention.attention,
            attention.ATTENTION,
            [q, _Slot(op.layer, "cache", 0)],
            [out],
            lambda at: {
                "q": at(q), "out": at(out), "stride": _stride(at(q)), "group": n_head // state.n_head_kv,
                "n_head_kv": state.n_head_kv, "head_dim": op.head_dim, "layer": op.layer, "scratch": scratch,
                "scratch_stride": size, "window": state.window or MAX_TOKENS, "sinks": sinks, "scale": op.scale,
                "softcap": op.softcap or 0.0,
            },
            work_seen=2.0 * q.width,
        )  # fmt: skip

    def _gated(self, gate: _Slot, up: _Slot, out: _Slot, activation: g.Activation) -> None:
        self._step(
            elementwise.gated(activation),
            elementwise.GATED,
            [gate, up],
            [out],
            lambda at: {
                "gate": at(gate), "up": at(up), "out": at(out), "stride": _stride(at(out)),
                "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK, "slots": out.slots,
            },
            work_unit=ACTIVATION_BLOCK,
        )  # fmt: skip

    def _sigmoid_gate(self, op: g.SigmoidGate) -> None:
        x, gate, out = _f32(op.x), _f32(op.gate), _f32(op.out)
        self._step(
            elementwise.sigmoid_gate,
            elementwise.SIGMOID_GATE,
            [x, gate],
            [out],
            lambda at: {
                "x": at(x), "gate": at(gate), "gate_stride": _stride(at(gate)), "out": at(out),
                "stride": _stride(at(out)), "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK,
            },
        )  # fmt: skip

    def _columns(self, op: g.Columns) -> None:
        x, out = _f32(op.x), _f32(op.out)
        self._step(
            elementwise.columns,
            elementwise.COLUMNS,
            [x],
            [out],
            lambda at: {
                "x": at(x)[:, op.first :], "x_stride": _stride(at(x)), "out": at(out), "out_stride": _stride(at(out)),
                "width": out.width,
            },
        )  # fmt: skip

    def _moe(self, op: g.MoE) -> None:
        n_expert, n_ff, _ = op.gate.shape
        n_used, router, x = op.n_used, _f32(op.router), _f32(op.x)
        chosen, slots = (_Slot((op, name), "int64", n_used) for name in ("chosen", "slots"))
        rows, weights = _Slot((op, "rows"), "int64", n_used), _Slot((op, "weights"), "float32", n_used)
        starts = _Slot((op, "starts"), "int64", n_expert + 1)
        scale = self._vector(op.scale) if op.scale else 0
        self._step(
            experts.route,
            experts.ROUTE,
            [router],
            [router, chosen, weights],
            lambda at: {
                "router": at(router), "stride": _stride(at(router)), "n_expert": n_expert, "n_used": n_used,
                "renormalize": op.renormalize, "scale": scale, "chosen": at(chosen), "weights": at(weights),
            },
        )  # fmt: skip
        self._step(
            experts.sort,
            experts.SORT,
            [chosen],
            [starts, slots, rows],
            lambda at: {
                "chosen": at(chosen), "n_expert": n_expert, "n_used": n_used, "starts": at(starts), "slots": at(slots),
                "rows": at(rows),
            },
        )  # fmt: skip
        gathered = _Slot((op, "x"), "f32", x.width, n_used)
        for form in sorted({self._matrix(tensor).packing.activation for tensor in (op.gate, op.up)}):
            target = attrs.evolve(gathered, form=form)
            self._gather(self._rounded(x, form), target, rows, n_used)
            self._done.add(target)
        gate, up, hidden = (_Slot((op, name), "f32", n_ff, n_used) for name in ("gate", "up", "hidden"))
        down, out = _Slot((op, "down"), "f32", x.width, n_used), _f32(op.out)
        self._linear(gathered, op.gate, gate, op.gate_bias, starts=starts)
        self._linear(gathered, op.up, up, op.up_bias, starts=starts)
        self._gated(gate, up, hidden, op.activation)
        self._linear(hidden, op.down, down, op.down_bias, starts=starts)
        self._step(
            experts.combine,
            experts.COMBINE,
            [down, slots, weights],
            [out],
            lambda at: {
                "x": at(down), "x_stride": _stride(at(down)), "out": at(out), "out_stride": _stride(at(out)),
                "width": out.width, "slots": at(slots), "weights": at(weights), "n_used": n_used,
            },
        )  # fmt: skip

    def _gather(self, source: _Slot, target: _Slot, rows: _Slot, n_used: int) -> None:
        self._step(
            experts.gather,
            experts.GATHER,
            [source, rows],
            [target],
            lambda at: {
                "x": at(source), "out": at(target), "row_bytes": _stride(at(source)), "rows": at(rows), "n_used": n_used
            },
        )  # fmt: skip


class NativeProgram:
    """A graph laid out as steps. `forward` may be called from any thread; calls take turns."""

    def __init__(self, graph: g.Graph, file: ModelFile, mode: QuantMode, team: Team):
        lowered = _Lowering(graph, file, mode, team)
        self.states: Sequence[g.AttentionState] = graph.states
        self._team, self._steps, self._tail = team, lowered.steps, lowered.tail
        self._ropes, self._matrices = list(lowered.ropes.values()), lowered.matrices
        logits = graph.ops[-1].out
        self._n_vocab = logits.width
        buffers = _assign_buffers(lowered.steps, [_f32(op.out) for op in lowered.embeds], keep=_f32(logits))
        self._logits_stride = _stride(buffers[_f32(logits)])
        self._embeds = [(lowered.matrices[op.table], buffers[_f32(op.out)]) for op in lowered.embeds]
        self._alive = [_bind(step, buffers) for step in lowered.steps]
        _place_barriers(lowered.steps, buffers)
        self._run, self._rows = np.zeros(1, RUN), np.zeros(N_BATCH, ROW)
        self._run["rows"] = self._rows.ctypes.data
        self._work, self._work_seen = (
            np.array([getattr(step, name) for step in self._steps]) for name in ("work", "work_seen")
        )
        self._tables: dict[KVType, Array] = {}
        self._table(KVType("f16", "f16"))

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
        stride = self._logits_stride
        with self._team.lock:
            table = self._table(spans[0].sequence.kv_type)
            self._place(spans)
            for matrix, buffer in self._embeds:
                buffer[:n, : matrix.shape[1]] = matrix.rows(tokens)
            logits = np.empty((n - first, stride // 4), np.float32)
            self._steps[-1].params["out"] = logits.ctypes.data - first * stride
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


def _assign_buffers(steps: list[_Step], given: list[_Slot], keep: _Slot) -> dict[_Slot, Array]:
    """A buffer for every slot, shared by slots that are never alive at once. `given` are alive from the start.

    `keep` is bound anew for each run: its buffer only says how its rows are laid out.
    """
    last_use = {slot: i for i, step in enumerate(steps) for slot in (*step.reads, *step.writes)}
    free: dict[tuple[str, int, int], list[Array]] = defaultdict(list)
    buffers = {slot: slot.allocate() for slot in given}
    for i, step in enumerate(steps):
        for slot in step.writes:
            if slot not in buffers and slot.form != "cache":
                buffers[slot] = free[slot.kind].pop() if free[slot.kind] and slot != keep else slot.allocate()
        for slot in {*step.reads, *step.writes}:
            if last_use[slot] == i and slot in buffers and slot != keep:
                free[slot.kind].append(buffers[slot])
    return buffers


def _bind(step: _Step, buffers: dict[_Slot, Array]) -> list[Array]:
    """Fill the step's record; returns the arrays whose addresses it holds, which must live as long as it."""
    step.params = np.zeros(1, step.record)
    values = step.bind(lambda slot: buffers[slot])
    for name, value in values.items():
        step.params[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return [value for value in values.values() if isinstance(value, np.ndarray)]


def _place_barriers(steps: list[_Step], buffers: dict[_Slot, Array]) -> None:
    """Mark the steps behind which all threads must meet before the next one begins."""

    def identity(slot: _Slot) -> object:
        return id(buffers[slot]) if slot in buffers else slot

    written: dict[object, _Step] = {}
    read: set[object] = set()
    for before, step in zip([None, *steps], steps, strict=False):
        needs = {identity(slot) for slot in step.reads}
        makes = {identity(slot) for slot in step.writes}
        waits = any(written[buffer] is not step.follows for buffer in needs & written.keys())
        if before is not None and (waits or makes & (read | written.keys())):
            before.barrier = True
            written, read = {}, set()
        read |= needs
        written |= dict.fromkeys(makes, step)


def _f32(value: g.Value) -> _Slot:
    return _Slot(value, "f32", value.width)


def _stride(buffer: Array) -> int:
    return int(buffer.strides[0])

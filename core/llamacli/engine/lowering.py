"""From ops to steps: which kernels compute an op, on what, and with which parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from llamacli import graph as g
from llamacli.engine.base import QuantMode
from llamacli.engine.steps import Array, Bind, Slot, Step, f32, stride
from llamacli.engine.weights import Matrix, load_matrix, load_rows
from llamacli.kernels import attention, elementwise, experts
from llamacli.kernels.jit import Kernel
from llamacli.kernels.linear import LINEAR, linear
from llamacli.kernels.packing_formats import ACTIVATION_BLOCK, ROWS
from llamacli.kernels.team import Team
from llamacli.kv import KVType
from llamacli.loaders import ModelFile
from llamacli.ops.rope import Rope

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 40
"""Stands for no bound: more tokens than there can be."""


class RopeTable:
    """Cosines and sines of one RoPE variant for all positions so far, and the parameters that point to them."""

    def __init__(self, rope: Rope, factors: Array | None, prefix: str = ""):
        self._rope, self._factors = rope, factors
        self._fields = f"{prefix}cos", f"{prefix}sin"
        self._tables: list[Array] = [np.empty((0, rope.n_dims // 2), np.float32)] * 2
        self.steps: list[Step] = []

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


class Lowering:
    """Ops to steps. `tail` is the first step after the last attention: its rows depend on no others."""

    def __init__(self, graph: g.Graph, file: ModelFile, mode: QuantMode, team: Team):
        self._file, self._mode, self._team, self._states = file, mode, team, graph.states
        self._routers, self._repacked = graph.routers(), set[int]()
        self.matrices: dict[g.Tensor, Matrix] = {}
        self._vectors: dict[g.Tensor, Array] = {}
        self.ropes: dict[tuple[Rope, g.Tensor | None, str], RopeTable] = {}
        self.steps: list[Step] = []
        self.tail = 0
        self._done: set[Slot] = set()
        widths = [op.gate.shape[1] for op in graph.ops if isinstance(op, g.MoE)]
        self._zeros = np.zeros(max(*widths, *(op.out.width for op in graph.ops)) + ROWS, np.float32)
        self._scratch: dict[int, Array] = {}
        self.embeds = [op for op in graph.ops if isinstance(op, g.Embed)]

        uses = Counter(value for op in graph.ops for value in op.inputs())
        made = {op.out: i for i, op in enumerate(graph.ops)}
        self._residual: dict[g.Op, tuple[g.Add, g.Value]] = {}
        for op in graph.ops:
            if isinstance(op, g.Add):
                for product, other in ((op.b, op.a), (op.a, op.b)):
                    maker = graph.ops[made[product]]
                    # A product that only goes into a sum is added where it is computed, if the rest is there by then.
                    if isinstance(maker, g.Linear) and uses[product] == 1 and made[other] < made[product]:
                        self._residual[maker] = op, other
                        break
        fused = {add for add, _ in self._residual.values()}
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
                self._linear(f32(op.x), op.weight, f32(add.out), op.bias, f32(other) if other else None)
            case g.Rotate():
                self._rotate(op)
            case g.Store():
                self._store(op)
            case g.Attention():
                self._attention(op)
            case g.Gated():
                self._gated(f32(op.gate), f32(op.up), f32(op.out), op.activation)
            case g.SigmoidGate():
                self._sigmoid_gate(op)
            case g.Add():
                self._by_blocks(elementwise.add, elementwise.ADD, {"a": op.a, "b": op.b}, op.out)
            case g.Scale():
                factor = op.factor * (float(self.vector(op.by)[0]) if op.by else 1.0)
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

    def vector(self, tensor: g.Tensor) -> Array:
        """A tensor that is added or scales, padded; each is loaded once."""
        if tensor not in self._vectors:
            self._vectors[tensor] = load_rows(tensor, self._file)
        return self._vectors[tensor]

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step(
        self,
        kernel: Kernel | Callable[[KVType], Kernel],
        record: np.dtype[np.void],
        reads: Sequence[Slot],
        writes: Sequence[Slot],
        bind: Bind,
        **more: Any,
    ) -> Step:
        step = Step(kernel, record, tuple(reads), tuple(writes), bind, **more)
        self.steps.append(step)
        return step

    def _rms_norm(self, op: g.RmsNorm) -> None:
        x, out = f32(op.x), f32(op.out)
        weight = self.vector(op.weight) if op.weight else np.ones(op.head_dim + ROWS, np.float32)
        self._step(
            elementwise.rms_norm,
            elementwise.RMS_NORM,
            [x],
            [out],
            lambda at: {
                "x": at(x), "out": at(out), "weight": weight, "stride": stride(at(x)), "head_dim": op.head_dim,
                "n_heads": x.width // op.head_dim, "eps": op.eps,
            },
            work_unit=op.head_dim,
        )  # fmt: skip

    def _by_blocks(
        self, kernel: Kernel, record: np.dtype[np.void], inputs: dict[str, g.Value], result: g.Value, **more: float
    ) -> None:
        """A step that does the same to every element, in blocks of 32."""
        slots, out = {name: f32(value) for name, value in inputs.items()}, f32(result)
        self._step(
            kernel,
            record,
            list(slots.values()),
            [out],
            lambda at: {
                **{name: at(slot) for name, slot in slots.items()}, "out": at(out), "stride": stride(at(out)),
                "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK, **more,
            },
        )  # fmt: skip

    def _rounded(self, x: Slot, form: str) -> Slot:
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
                    "x": at(x), "x_stride": stride(at(x)), "out": at(out), "out_stride": stride(at(out)),
                    "width": at(x).shape[1], "by_row": by_row, "slots": x.slots,
                },
                follows=made if aligned else None,
            )  # fmt: skip
            self._done.add(out)
        return out

    def _linear(
        self, x: Slot, tensor: g.Tensor, out: Slot, bias: g.Tensor | None = None, residual: Slot | None = None,
        starts: Slot | None = None,
    ) -> None:  # fmt: skip
        matrix = self._matrix(tensor)
        biases = self.vector(bias) if bias else self._zeros
        bias_stride = stride(biases) if biases.ndim > 1 else 0
        source = self._rounded(x, matrix.packing.activation)
        n_groups, n_tiles, n_blocks, _ = matrix.packed.shape
        self._step(
            linear(matrix.kind),
            LINEAR,
            [slot for slot in (source, residual, starts) if slot],
            [out],
            lambda at: {
                "weight": matrix.packed, "tile_bytes": matrix.packed[0, 0].nbytes, "n_tiles": n_tiles,
                "n_blocks": n_blocks, "x": at(source), "x_stride": stride(at(source)), "out": at(out),
                "out_stride": stride(at(out)), "bias": biases, "bias_stride": bias_stride,
                "residual": at(residual) if residual else 0, "n_groups": n_groups,
                "starts": at(starts) if starts else 0,
            },
            work=float(matrix.shape[0] * matrix.shape[1] * max(1, x.slots)),
        )  # fmt: skip

    def _rotate(self, op: g.Rotate) -> None:
        rope, x, out = op.rope, f32(op.x), f32(op.out)
        first_step, second = (2, 1) if rope.interleaved else (1, rope.n_dims // 2)
        made = next((step for step in reversed(self.steps) if x in step.writes), None)
        step = self._step(
            elementwise.rotate,
            elementwise.ROTATE,
            [x],
            [out],
            lambda at: {
                "x": at(x), "out": at(out), "stride": stride(at(x)), "n_heads": x.width // op.head_dim,
                "head_dim": op.head_dim, "n_dims": rope.n_dims, "first_step": first_step, "second": second,
                "long_from": rope.n_ctx_orig + 1 if op.long_factors else MAX_TOKENS,
            },
            follows=made if made is not None and made.work_unit == op.head_dim else None,
        )  # fmt: skip
        tables = {"": op.factors} | ({"long_": op.long_factors} if op.long_factors else {})
        for prefix, factors in tables.items():
            key = (rope, factors, prefix)
            if key not in self.ropes:
                divisors = self.vector(factors)[: rope.n_dims // 2] if factors else None
                self.ropes[key] = RopeTable(rope, divisors, prefix)
            self.ropes[key].steps.append(step)

    def _store(self, op: g.Store) -> None:
        k, v, state = f32(op.k), f32(op.v), self._states[op.layer]
        self._step(
            attention.store_kv,
            attention.STORE,
            [k, v],
            [Slot(op.layer, "cache", 0)],
            lambda at: {
                "k": at(k), "v": at(v), "stride": stride(at(k)), "layer": op.layer, "n_head_kv": state.n_head_kv,
                "head_dim": state.head_dim, **self._head_scratch(state.head_dim),
            },
        )  # fmt: skip

    def _attention(self, op: g.Attention) -> None:
        q, out, state = f32(op.q), f32(op.out), self._states[op.layer]
        sinks = self.vector(op.sinks) if op.sinks else 0
        n_head = q.width // op.head_dim
        self._step(
            attention.attention,
            attention.ATTENTION,
            [q, Slot(op.layer, "cache", 0)],
            [out],
            lambda at: {
                "q": at(q), "out": at(out), "stride": stride(at(q)), "group": n_head // state.n_head_kv,
                "n_head_kv": state.n_head_kv, "head_dim": op.head_dim, "layer": op.layer, "sinks": sinks,
                "window": state.window or MAX_TOKENS, "scale": op.scale, "softcap": op.softcap or 0.0,
                **self._head_scratch(op.head_dim),
            },
            work_seen=2.0 * q.width,
        )  # fmt: skip

    def _head_scratch(self, head_dim: int) -> dict[str, Any]:
        """What each thread may write in, in steps that deal with heads."""
        size = attention.scratch_bytes(head_dim)
        scratch = self._scratch.setdefault(size, np.zeros((self._team.n_threads, size // 4), np.float32))
        return {"scratch": scratch, "scratch_stride": size}

    def _gated(self, gate: Slot, up: Slot, out: Slot, activation: g.Activation) -> None:
        self._step(
            elementwise.gated(activation),
            elementwise.GATED,
            [gate, up],
            [out],
            lambda at: {
                "gate": at(gate), "up": at(up), "out": at(out), "stride": stride(at(out)),
                "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK, "slots": out.slots,
            },
            work_unit=ACTIVATION_BLOCK,
        )  # fmt: skip

    def _sigmoid_gate(self, op: g.SigmoidGate) -> None:
        x, gate, out = f32(op.x), f32(op.gate), f32(op.out)
        self._step(
            elementwise.sigmoid_gate,
            elementwise.SIGMOID_GATE,
            [x, gate],
            [out],
            lambda at: {
                "x": at(x), "gate": at(gate), "gate_stride": stride(at(gate)), "out": at(out),
                "stride": stride(at(out)), "n_blocks": at(out).shape[1] // ACTIVATION_BLOCK,
            },
        )  # fmt: skip

    def _columns(self, op: g.Columns) -> None:
        x, out = f32(op.x), f32(op.out)
        self._step(
            elementwise.columns,
            elementwise.COLUMNS,
            [x],
            [out],
            lambda at: {
                "x": at(x)[:, op.first :], "x_stride": stride(at(x)), "out": at(out), "out_stride": stride(at(out)),
                "width": out.width,
            },
        )  # fmt: skip

    def _moe(self, op: g.MoE) -> None:
        n_expert, n_ff, _ = op.gate.shape
        n_used, router, x = op.n_used, f32(op.router), f32(op.x)
        chosen, slots = (Slot((op, name), "int64", n_used) for name in ("chosen", "slots"))
        rows, weights = Slot((op, "rows"), "int64", n_used), Slot((op, "weights"), "float32", n_used)
        starts = Slot((op, "starts"), "int64", n_expert + 1)
        scale = self.vector(op.scale) if op.scale else 0
        self._step(
            experts.route,
            experts.ROUTE,
            [router],
            [router, chosen, weights],
            lambda at: {
                "router": at(router), "stride": stride(at(router)), "n_expert": n_expert, "n_used": n_used,
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
        gathered = Slot((op, "x"), "f32", x.width, n_used)
        for form in sorted({self._matrix(tensor).packing.activation for tensor in (op.gate, op.up)}):
            target = attrs.evolve(gathered, form=form)
            self._gather(self._rounded(x, form), target, rows, n_used)
            self._done.add(target)
        gate, up, hidden = (Slot((op, name), "f32", n_ff, n_used) for name in ("gate", "up", "hidden"))
        down, out = Slot((op, "down"), "f32", x.width, n_used), f32(op.out)
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
                "x": at(down), "x_stride": stride(at(down)), "out": at(out), "out_stride": stride(at(out)),
                "width": out.width, "slots": at(slots), "weights": at(weights), "n_used": n_used,
            },
        )  # fmt: skip

    def _gather(self, source: Slot, target: Slot, rows: Slot, n_used: int) -> None:
        self._step(
            experts.gather,
            experts.GATHER,
            [source, rows],
            [target],
            lambda at: {
                "x": at(source), "out": at(target), "row_bytes": stride(at(source)), "rows": at(rows), "n_used": n_used
            },
        )  # fmt: skip

"""Step table of a program, with the services that lowering uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.host import checked, describe_ops, is_plugin_op
from llamacli.engine.packed_copies import MappedStack
from llamacli.engine.weights import PackedWeights
from llamacli.errors import PluginError, plugin_errors
from llamacli.graph import Graph, Op, Tensor, Value
from llamacli.kernels.activation_rounding import FORMS, ROUND, round_activations
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ACTIVATION_BLOCK
from llamacli.kernels.matrix import Matrix, Stack
from llamacli.kernels.packing_formats import ROWS, IntegerPacking, TiledPacking
from llamacli.kernels.team import Team
from llamacli.kv import KVType
from llamacli.ops.embed import Embed
from llamacli.ops.lowering import Array, Field, HostRows, Lowering, Resource, Slot, Step, f32, slots_of
from llamacli.ops.run import Run
from llamacli.util.memory import anonymous
from llamacli.util.settings import KERNEL_API_CHANGE

HOST = np.dtype([])
_LINE = 64

Watch = Callable[[Tensor, npt.NDArray[np.float32], npt.NDArray[np.int64] | None], None]
"""Callback of each matrix product: `watch(tensor, x, starts)`. `x` is float32 [n_rows, n_in]; with `starts`, int64
[n_groups + 1], its rows starts[i] to starts[i + 1] - 1 are multiplied by matrix i of the tensor."""


class StepTable(Lowering):
    """Step table of a graph.

    `decoder` is the first step behind those of the encoder, 0 without one; `tail` the first one whose rows depend on no
    other rows. `hidden` is the value that the output layer reads, None if there is no such layer, and `output` the
    first step after it and after the value that the graph passes. `prepares` are called before each run; `host_ops` are
    the ops that run in NumPy, and `plugin_steps` those of plugins' ops, both described, by their step. With
    `is_tiled`, products of integer weights and of attention are by tiles of AMX.
    """

    def __init__(
        self, graph: Graph, weights: PackedWeights, team: Team, watch: Watch | None = None, *, is_tiled: bool = False
    ):
        self._weights, self._team, self._watch = weights, team, watch
        self.watches_products, self.is_tiled = watch is not None, is_tiled
        self._resources: dict[object, Any] = {}
        self._made: dict[Slot, Step] = {}
        self._read: set[Stack] = set()
        self._descriptions = describe_ops(graph)
        self.states, self.recurrent = graph.states, graph.recurrent
        self.steps: list[Step] = []
        self.prepares: list[Callable[[int], int]] = []
        self.jump_prepares: list[Callable[[npt.NDArray[np.int32]], None]] = []
        self.host_ops: dict[Step, str] = {}
        self.plugin_steps: dict[Step, str] = {}
        biases = [(1, *tensor.shape)[-2] for op in graph.ops for tensor in op.tensors()]
        self.zeros = np.zeros(max([*biases, *(op.out.width for op in graph.ops)]) + ROWS, np.float32)
        n_body, n_encoder = graph.tail, graph.n_encoder
        self.decoder = 0
        for i, op in enumerate(graph.ops[:n_body], start=1):
            self._lower(op)
            if i == n_encoder:
                self.decoder = len(self.steps)
        self.tail = len(self.steps)
        self.hidden = graph.hidden
        self.output = 0
        for op in graph.ops[n_body:]:
            self._lower(op)
            if op.out in (self.hidden, graph.passed):
                self.output = len(self.steps)

    def _lower(self, op: Op) -> None:
        self._op = op
        self._read_ahead(op)
        if not is_plugin_op(op):
            op.lower(self)
            return
        n_before, description = len(self.steps), self._descriptions[op]
        with plugin_errors(description):
            op.lower(self)
        self.plugin_steps |= dict.fromkeys(self.steps[n_before:], description)

    def _read_ahead(self, op: Op) -> None:
        """Append a step that waits for the op's matrices.

        Only where weights are mapped. Stacks of experts have steps of their own, as a pass uses some of them.
        """
        if isinstance(op, Embed):
            return
        mapped = [self._weights.matrix(tensor).stack for tensor in op.matrices()]
        stacks = [stack for stack in mapped if isinstance(stack, MappedStack) and len(stack.data) == 1]
        if not stacks:
            return
        reader = self._weights.reader
        number = reader.add(stacks)
        self._read |= {*stacks}
        self.host_step(lambda _rows, _at: reader.use(number), [], [])

    def release(self) -> list[object]:
        """Drop all references to steps and their memory.

        Returns what steps share, which must live as long as they do, for kernels read it by its address.
        Functions of steps refer to the table: without this, a program and its weights would be parts of reference
        cycles, which only the garbage collector frees.
        """
        kept = list(self._resources.values())
        self.steps, self.prepares, self.jump_prepares, self.host_ops, self.plugin_steps = [], [], [], {}, {}
        self._resources, self._made = {}, {}
        return kept

    def watch_product(self, x: Slot, tensor: Tensor, starts: Slot | None) -> None:
        watch = self._watch
        assert watch is not None

        def show(rows: HostRows, at: Callable[[Slot], Array]) -> None:
            buffer = at(x)[:, : x.width]
            if starts is None:
                watch(tensor, buffer[rows.first : rows.stop], None)
            else:
                edges = at(starts)[0]
                watch(tensor, buffer[: edges[-1]], edges)

        self.host_step(show, [x, starts] if starts else [x], [])

    def memory(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def matrix(self, tensor: Tensor) -> Matrix:
        matrix = self._weights.matrix(tensor)
        if matrix.stack and len(matrix.packed) == 1 and matrix.stack not in self._read:
            matrix.stack.fetch([0])
        if self.is_tiled and isinstance(matrix.packing, IntegerPacking):
            return attrs.evolve(matrix, packing=TiledPacking(matrix.packing))
        return matrix

    def vector(self, tensor: Tensor) -> Array:
        return self._weights.vector(tensor)

    def step(
        self,
        kernel: Kernel | Callable[[KVType], Kernel],
        record: np.dtype[np.void],
        *outdated: object,
        reads: Sequence[Slot] = (),
        writes: Sequence[str | Slot] = ("out",),
        follows: Step | None = None,
        work: float = 0.0,
        work_seen: float = 0.0,
        work_unit: int = 0,
        **fields: Field,
    ) -> Step:
        if outdated:
            raise PluginError(f"a step of an earlier LLAMACLI_KERNEL_API: {KERNEL_API_CHANGE}")
        if unknown := [name for name in writes if isinstance(name, str) and name not in fields]:
            raise PluginError(f"a step writes {', '.join(unknown)}, of which it is given no field")
        read = [slot for name, value in fields.items() if name not in writes for slot in slots_of(value)]
        written = [slot for name in writes for slot in slots_of(fields[name] if isinstance(name, str) else name)]
        return self._append(
            Step(kernel, record, (*read, *reads), tuple(written), fields, follows, work, work_seen, work_unit)
        )

    def host_step(
        self,
        function: Callable[[HostRows, Callable[[Slot], Array]], None],
        reads: Sequence[Slot],
        writes: Sequence[Slot],
    ) -> Step:
        return self._append(Step(None, HOST, tuple(reads), tuple(writes), host=function))

    def host_op(self, compute: Callable[[Run], Array], inputs: Sequence[Value], out: Value) -> None:
        op, description, states = self._op, self._descriptions[self._op], self.states
        weights = {tensor: self._weights.floats(tensor) for tensor in op.tensors()}

        def run_op(rows: HostRows, at: Callable[[Slot], Array]) -> None:
            for first, span in rows.parts():
                stop = first + span.n
                values = {value: at(f32(value))[first:stop, : value.width] for value in inputs}
                tokens = rows.tokens[first - rows.first : stop - rows.first]
                run = Run(tokens, span, states, values, weights.__getitem__)
                at(f32(out))[first:stop, : out.width] = checked(compute, run, out.width, description)

        step = self.host_step(run_op, [f32(value) for value in inputs], [f32(out)])
        self.host_ops[step] = description

    def maker(self, slot: Slot) -> Step | None:
        return self._made.get(slot)

    def rounded(self, slot: Slot, form: str) -> Slot:
        """See Lowering.

        The threads that computed the slot also round it, if its work is divided in a fitting way.
        """
        if form == slot.form:
            return slot
        out = attrs.evolve(slot, form=form)
        if out not in self._made:
            made = self.maker(slot)
            by_row = made is not None and made.work_unit == slot.width
            whole_blocks = FORMS[form].width == ACTIVATION_BLOCK
            aligned = by_row or (made is not None and made.work_unit == ACTIVATION_BLOCK and whole_blocks)
            self.step(
                round_activations(form), ROUND, x=slot, out=out, by_row=by_row, slots=slot.slots,
                width=-(-slot.width // ACTIVATION_BLOCK) * ACTIVATION_BLOCK, follows=made if aligned else None,
            )  # fmt: skip
        return out

    def scratch(self, n_bytes: int) -> Array:
        n_threads, n_lines = self._team.n_threads, -(-n_bytes // _LINE)
        memory = self.shared(("scratch", n_lines), lambda: anonymous(n_threads * n_lines * _LINE).view(np.float32))
        return memory.reshape(n_threads, -1)

    def shared(self, key: object, make: Callable[[], Resource]) -> Resource:
        if key not in self._resources:
            self._resources[key] = make()
        resource: Resource = self._resources[key]
        return resource

    def before_run(self, prepare: Callable[[int], int]) -> None:
        self.prepares.append(prepare)

    def before_jump(self, prepare: Callable[[npt.NDArray[np.int32]], None]) -> None:
        self.jump_prepares.append(prepare)

    def _append(self, step: Step) -> Step:
        self.steps.append(step)
        self._made.update(dict.fromkeys(step.writes, step))
        return step

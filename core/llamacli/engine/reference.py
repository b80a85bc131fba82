"""Reference engine: every op in NumPy.

float64 inside an op and float32 between ops. Faster engines are checked against it. Every op computes a token's row in
a way that does not depend on how many tokens are evaluated together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Prompts, QuantMode, Timings, wanted_rows
from llamacli.engine.floats import load_floats, modes_of
from llamacli.engine.host import compute, describe_ops, is_plugin_op
from llamacli.graph import Graph, Tensor, Value
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.loaders import ModelFile
from llamacli.ops.run import Run, Span
from llamacli.ops.shift_plan import ShiftPlan

Array = npt.NDArray[np.float32]


class ReferenceEngine:
    """Engine of NumPy ops.

    With prompts by tiles, it multiplies tokens of prompts as AMX does, by weights of any type.
    """

    def __init__(self, prompts: Prompts = Prompts.REGISTERS):
        self._prompts = prompts

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> ReferenceProgram:
        """Dequantize every tensor that the graph reads.

        Modes `q8` and `q4` round all matrices but routers first.
        """
        modes = modes_of(graph, mode)
        weights = {tensor: load_floats(tensor, file, modes[tensor]) for tensor in modes}
        return ReferenceProgram(graph, weights, mode, self._prompts)


class ReferenceProgram:
    """A graph and its `weights` in float64."""

    def __init__(
        self,
        graph: Graph,
        weights: dict[Tensor, npt.NDArray[np.float64]],
        mode: QuantMode = QuantMode.AUTO,
        prompts: Prompts = Prompts.REGISTERS,
    ):
        self.graph, self.weights, self._mode, self.prompts = graph, weights, mode, prompts
        self._shifts = ShiftPlan(graph.ops, weights.__getitem__)
        self._n_encoder, self._tail = graph.n_encoder, graph.tail
        self.has_encoder = self._n_encoder > 0
        self._plugin_ops = {op: text for op, text in describe_ops(graph).items() if is_plugin_op(op)}
        self.timings = Timings()

    def load(self, tensors: Iterable[Tensor], file: ModelFile) -> Mapping[Tensor, npt.NDArray[np.float64]]:
        """See `llamacli.engine.base.Program.load`."""
        return {tensor: load_floats(tensor, file, QuantMode.FP32) for tensor in tensors}

    def recompiled(self, graph: Graph, matrices: Mapping[Tensor, npt.NDArray[np.float64]]) -> ReferenceProgram:
        """See `llamacli.engine.base.Program.recompiled`."""
        return ReferenceProgram(graph, {**self.weights, **matrices}, self._mode, self.prompts)

    def extended(self, graph: Graph, file: ModelFile) -> ReferenceProgram:
        """See `llamacli.engine.base.Program.extended`."""
        modes = modes_of(graph, self._mode)
        more = {tensor: load_floats(tensor, file, modes[tensor]) for tensor in modes if tensor not in self.weights}
        return ReferenceProgram(graph, {**self.weights, **more}, self._mode)

    @property
    def states(self) -> Sequence[KVSpec]:
        """See `llamacli.engine.base.Program.states`."""
        return self.graph.states

    @property
    def recurrent(self) -> Sequence[RecurrentSpec]:
        """See `llamacli.engine.base.Program.recurrent`."""
        return self.graph.recurrent

    @property
    def max_positions(self) -> int | None:
        """See `llamacli.engine.base.Program.max_positions`."""
        return self.graph.max_positions

    @property
    def needs_whole_input(self) -> bool:
        """See `llamacli.engine.base.Program.needs_whole_input`."""
        return self.graph.needs_whole_input

    def shift_keys(self, layer: int, keys: Array, by: int, seq_len: int) -> Array:
        """See `llamacli.engine.base.Program.shift_keys`."""
        return self._shifts.shift(layer, keys, by, seq_len)

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return self._shifts.rope_variant(seq_len)

    is_whole = True

    @property
    def has_hidden(self) -> bool:
        """See `llamacli.engine.base.Program.has_hidden`."""
        return self.graph.hidden is not None

    def forward(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], *, hidden: bool = False
    ) -> Array:
        """See `llamacli.engine.base.Program.forward`."""
        parts, start = [], 0
        for span, n_rows in zip(spans, n_last, strict=True):
            parts.append(self._forward(tokens[start : start + span.n], span, n_rows, hidden))
            start += span.n
        return np.concatenate(parts)

    def forward_in_pieces(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> Generator[None, None, Array]:
        """See `llamacli.engine.base.Program.forward_in_pieces`; it is one piece."""
        yield
        return self.forward(tokens, spans, n_last)

    def forward_with_hidden(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int]
    ) -> tuple[Array, Array]:
        """See `llamacli.engine.base.Program.forward_with_hidden`."""
        ends = np.cumsum([span.n for span in spans])
        logits, states, out, hidden = [], [], self.graph.ops[-1].out, self.graph.passed or self.graph.hidden
        assert hidden is not None
        for end, span, n_rows in zip(ends.tolist(), spans, n_last, strict=True):
            values = self._values(tokens[end - span.n : end], span, span.n, out)
            logits.append(values[out][span.n - n_rows :])
            states.append(values[hidden])
        return np.concatenate(logits), np.concatenate(states)

    def _forward(self, tokens: npt.NDArray[np.int32], span: Span, n_rows: int, hidden: bool) -> Array:
        out = self.graph.hidden if hidden else self.graph.ops[-1].out
        if span.encodes and self.graph.sent_by_encoder is not None:
            out, n_rows = self.graph.sent_by_encoder, span.n
        assert out is not None
        values = self._values(tokens, span, n_rows, out)
        rows = values[out] if out in values else np.empty((0, out.width), np.float32)
        return rows[wanted_rows([span], [n_rows], self.graph.n_merged)] if len(rows) == span.n else rows

    def _values(self, tokens: npt.NDArray[np.int32], span: Span, n_rows: int, last: Value) -> dict[Value, Array]:
        """Compute the values up to the `last`.

        Those of the tail for the last `n_rows` tokens only.
        """
        values: dict[Value, Array] = {}
        weight = self.weights.__getitem__
        is_tiled = span.is_prompt and self.prompts is Prompts.TILES
        run = Run(tokens, span, self.states, values, weight, is_tiled)
        part = (0, self._n_encoder) if span.encodes else (self._n_encoder, None)
        for i, op in enumerate(self.graph.ops[slice(*part)], start=part[0]):
            if i == self._tail:
                wanted = wanted_rows([span], [n_rows], self.graph.n_merged)
                values = {value: rows[wanted] for value, rows in values.items()}
                run = Run(tokens[wanted], span.part(span.n - n_rows, span.n), self.states, values, weight, is_tiled)
            if i >= self._tail and not n_rows:
                break
            values[op.out] = compute(op, run, self._plugin_ops.get(op))
            if op.out == last:
                break
        return values

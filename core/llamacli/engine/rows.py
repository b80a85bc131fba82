"""Rows of matrix products divided among nodes (tensor parallelism by rows).

All nodes run the same ops on the same activations, but for matrix products, of which each computes its rows, mixtures
of experts included. The columns of their results are gathered before an op reads them that needs all. Sums are not
divided, so that the bits are those of one process. Only the first node, which has the tokens' sequences, looks up
embeddings and has results.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.base import Program
from llamacli.engine.cutting import StageGraph
from llamacli.engine.stages import DividedProgram, Floats, Stage, StageBatch
from llamacli.graph import Graph, Op, Param, Tensor, Value
from llamacli.kernels.layout import ACTIVATION_BLOCK
from llamacli.kv.layout import Held
from llamacli.ops.columns import Columns
from llamacli.ops.decoder import Decoder
from llamacli.ops.embed import Embed
from llamacli.ops.exchange import Edges, Exchange, Gather, Gathered
from llamacli.ops.lanewise import Lanewise
from llamacli.ops.linear import Linear
from llamacli.ops.moe import Expert, MoE
from llamacli.ops.run import Span

_WAIT_S = 0.5


def edges_of(width: int, shares: Sequence[int]) -> Edges | None:
    """Columns at which the part of each node begins, and the width.

    Parts are whole blocks of activations. None for fewer blocks than nodes.
    """
    n_blocks, n = -(-width // ACTIVATION_BLOCK), len(shares)
    if n_blocks < n:
        return None
    edges = [0]
    for i, share in enumerate(itertools.accumulate(shares[:-1]), start=1):
        edges.append(min(max(round(n_blocks * share / sum(shares)), edges[-1] + 1), n_blocks - n + i))
    return (*(ACTIVATION_BLOCK * edge for edge in edges), width)


def rows_of(graph: Graph, shares: Sequence[int], number: int, exchange: Exchange) -> StageGraph:
    """Graph that one of several nodes computes."""
    held = Held(frozenset(range(len(graph.states))), frozenset(range(len(graph.recurrent))))
    return StageGraph(graph, _Division(graph, shares, number, exchange).divided(), held)


def divided_tensors(graph: Graph, n_nodes: int) -> set[Tensor]:
    """Tensors of which each node holds rows."""
    division = _Division(graph, [1] * n_nodes, 0, lambda own, _widths, *, to_first: [own])
    ops = [op for op in graph.ops if op.out in division.edges and not isinstance(op, Embed)]
    return {tensor for op in ops for tensor in op.matrices()}


class _Division:
    """Division of a graph's ops.

    `edges` of values that are computed by columns; `needed`: values of which an op reads all columns.
    """

    def __init__(self, graph: Graph, shares: Sequence[int], number: int, exchange: Exchange):
        self._graph, self._shares, self._number, self._exchange = graph, shares, number, exchange
        self._exact = graph.exact_tensors()
        self.edges: dict[Value, Edges] = {}
        self.needed = {graph.ops[-1].out, *filter(None, (graph.hidden, graph.passed))}
        for op in graph.ops:
            found = self._edges_of(op)
            if found is not None:
                self.edges[op.out] = found
            if found is None or not isinstance(op, Lanewise):
                self.needed |= {*op.inputs()}
        self._ops: list[Op] = []
        self._done: set[Op] = set()
        self._parts: dict[Value, Value] = {}
        self._whole: set[Value] = set()
        self._pending: dict[Value, None] = {}  # those that are needed and not gathered

    def _edges_of(self, op: Op) -> Edges | None:
        match op:
            case Embed():
                return (0, *[op.out.width] * len(self._shares))
            case Linear() if not op.changes and op.weight.name not in self._exact:
                return edges_of(op.out.width, self._shares)
            case MoE() if not any(one.changes for one in (op.gate, op.up, op.down) if one):
                return self._hidden_edges(op) and edges_of(op.out.width, self._shares)
            case Lanewise() if all(tensor.shape == (1,) for tensor in op.tensors()):
                found = {self.edges.get(value) for value in op.inputs()}
                return found.pop() if len(found) == 1 else None
        return None

    def _hidden_edges(self, op: MoE) -> Edges | None:
        return edges_of(op.up.weight.shape[1], self._shares)

    def divided(self) -> list[Op]:
        """Ops of this node."""
        ops, tail = self._graph.ops, self._graph.tail
        for i, op in enumerate(ops):
            if op not in self._done:
                stop = tail if i < tail else len(ops)
                self._gather(self._pending if isinstance(op, Decoder) else self._lacks(op), ops[i:stop])
                self._emit(op)
        self._gather([ops[-1].out], [])
        return self._ops

    def _lacks(self, op: Op) -> list[Value]:
        keeps = isinstance(op, Lanewise) and op.out in self.edges
        return [] if keeps else [value for value in op.inputs() if value in self._pending]

    def _gather(self, lacking: Any, following: Sequence[Op]) -> None:
        """Gather values, with all that can be computed without them."""
        if not any(value in self._pending for value in lacking):
            return
        for op in itertools.takewhile(lambda op: not isinstance(op, Decoder), following):
            is_product = isinstance(op, Embed | Linear) and op.out in self.edges
            if is_product and op not in self._done and self._whole.issuperset(op.inputs()):
                self._emit(op)
        values = [*self._pending]
        self._pending.clear()
        self._whole |= {*values}
        edges = tuple(self.edges[value] for value in values)
        gather = Gather(edges, self._exchange, to_first=values == [self._graph.ops[-1].out])
        parts = tuple(self._parts[value] for value in values if value in self._parts)
        if len(values) == 1:
            self._ops.append(Gathered(values[0], parts, gather))
            return
        firsts = [0, *itertools.accumulate(value.width for value in values)]
        wide = self._graph.value(firsts[-1])
        self._ops.append(Gathered(wide, parts, gather))
        self._ops += [
            Columns(value, wide, first, value.width, wide.width) for value, first in zip(values, firsts, strict=False)
        ]

    def _emit(self, op: Op) -> None:
        self._done.add(op)
        edges = self.edges.get(op.out)
        if edges is None:
            self._ops.append(op)
            self._whole.add(op.out)
            return
        if op.out in self.needed:
            self._pending[op.out] = None
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        if sizes[self._number]:
            part = self._parts[op.out] = self._graph.value(sizes[self._number])
            self._ops.append(self._part(op, part, sizes))

    def _part(self, op: Op, out: Value, sizes: Sequence[int]) -> Op:
        """Op that computes this node's columns."""
        match op:
            case Linear():
                part = Param(op.weight, op.bias).split(*sizes)[self._number]
                return attrs.evolve(op, out=out, weight=part.weight, bias=part.bias)
            case MoE():
                hidden = self._hidden_edges(op)
                assert hidden is not None
                gather, inner = Gather((hidden,), self._exchange), [b - a for a, b in itertools.pairwise(hidden)]
                gate, up = op.gate and self._rows(op.gate, inner), self._rows(op.up, inner)
                down = self._rows(op.down, sizes)
                return attrs.evolve(op, out=out, gate=gate, up=up, down=down, gather=gather)
            case Lanewise():
                fields = {field.name: getattr(op, field.name) for field in attrs.fields(type(op))}
                own = {name: self._parts[value] for name, value in fields.items() if value in self.edges}
                return attrs.evolve(op, **own | {"out": out})
        return attrs.evolve(op, out=out)

    def _rows(self, expert: Expert, sizes: Sequence[int]) -> Expert:
        part = Param(expert.weight, expert.bias).split(*sizes)[self._number]
        return attrs.evolve(expert, weight=part.weight, bias=part.bias)


class Nodes(Protocol):
    """The other nodes, as the first one sees them."""

    def begin(self, batch: StageBatch) -> None:
        """Have them compute a batch. Raises StageError."""

    def fail(self, error: Exception) -> None:
        """End the batch on all of them."""

    def interrupt(self) -> None:
        """Have the next exchange of a batch under way fail."""

    def connect(self, stages: Sequence[Any]) -> None:
        """Take others in their place. Raises StageError."""


class RowsProgram(DividedProgram):
    """Program of products whose rows are divided; see `llamacli.engine.base.Program`.

    It runs on a thread of its own, so that an interrupt leaves no exchange half done.
    """

    def __init__(
        self,
        graph: StageGraph,
        first: Program,
        stages: Sequence[Stage],
        nodes: Nodes,
        replaced: Callable[[Sequence[Stage]], Sequence[Stage]] | None = None,
    ):
        super().__init__(graph, first, stages, replaced)
        self._nodes, self._thread = nodes, ThreadPoolExecutor(1, "llamacli-rows")
        self._thread.submit(int).result()  # an interrupt while it starts its thread would have it start a second one

    def renew(self) -> None:
        super().renew()
        self._nodes.connect(self.stages)

    def results(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> list[Floats]:
        """See DividedProgram."""
        try:
            return self._thread.submit(self._run, tokens, spans, n_last, result).result()
        except BaseException:  # an interrupt too: pages are in use until the thread is idle
            idle: Future[int] | None = None
            while idle is None or not idle.done():
                with contextlib.suppress(KeyboardInterrupt):
                    idle = idle or self._thread.submit(int)
                    self._nodes.interrupt()
                    wait([idle], _WAIT_S)
            raise

    def _run(
        self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], n_last: Sequence[int], result: str
    ) -> list[Floats]:
        try:
            self._nodes.begin(self.batch_of(tokens, spans, n_last, result))
            with np.errstate(all="ignore"):
                if result == "both":
                    return [*self.first.forward_with_hidden(tokens, spans, n_last)]
                return [self.first.forward(tokens, spans, n_last, hidden=result == "hidden")]
        except Exception as error:
            self._nodes.fail(error)
            raise

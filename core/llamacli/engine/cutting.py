"""Cut of a graph into pipeline stages, by data flow.

A stage is an ordinary graph: it begins with what it receives, and ends with all values that later stages read. Ops and
values are those of the whole graph, layers of the cache keep their numbers, and an encoder is the first stage's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.graph import Graph, Op, Value
from llamacli.kv.layout import Held
from llamacli.ops.stages import Received, Sent
from llamacli.ops.store import Store


class StageGraph(Graph):
    """Part of a `whole` graph that one pipeline stage computes."""

    def __init__(self, whole: Graph, ops: list[Op], held: Held):
        super().__init__()
        self.states, self.recurrent, self.ops = whole.states, whole.recurrent, ops
        self.whole, self.held, self.n_batch = whole, held, whole.n_batch

    def with_ops(self, ops: list[Op]) -> StageGraph:
        assert self.held is not None
        return StageGraph(self.whole, ops, self.held)

    def exact_tensors(self) -> set[str]:
        """See Graph.

        A product may be of one stage, and what it decides of the next.
        """
        return self.whole.exact_tensors()

    def received_by(self, *, encodes: bool) -> int:
        """Width of the rows that it receives.

        For its part of the encoder, or for the rest.
        """
        n = self.n_encoder
        ops = self.ops[:n] if encodes else self.ops[n:]
        return sum(op.out.width for op in ops if isinstance(op, Received))

    @property
    def hidden(self) -> Value | None:
        """See Graph; what earlier stages send takes its place."""
        return self.ops[-1].out if isinstance(self.ops[-1], Sent) else self.whole.hidden


def cut_points(graph: Graph) -> list[int]:
    """Places between the layers of a graph, as numbers of ops.

    An op's layer is the number in the names of its tensors. Of the places between two layers, the one is taken that the
    fewest numbers cross. The first place is behind the encoder, if there is one.
    """
    begins = graph.n_encoder
    width = np.zeros(len(graph.ops) + 1, np.int64)
    made = {op.out: i for i, op in enumerate(graph.ops)}
    last_read = {value: i for i, op in enumerate(graph.ops) for value in op.inputs()}
    for value, last in last_read.items():
        width[made[value] + 1 : last + 1] += value.width
    points, layer, end = [begins] if begins else [], -1, 0
    for i, op in enumerate(graph.ops[begins:], start=begins):
        numbers = [int(match[1]) for tensor in op.tensors() if (match := re.search(r"\bblk\.(\d+)\.", tensor.name))]
        if not numbers:
            continue
        if max(numbers) > layer >= 0:
            points.append(end + int(np.argmin(width[end : i + 1])))
        layer, end = max(layer, *numbers), i + 1
    return points


def cut(graph: Graph, places: Sequence[int]) -> list[StageGraph]:
    """Cut a graph before the ops of these numbers.

    Raises InvalidRequestError for places that are not ascending, or within the encoder.
    """
    begins, n = graph.n_encoder, len(graph.ops)
    edges = [begins, *places, n]
    least = [0 if begins else 1, *(1 for _ in places)]  # ops of a stage behind the encoder
    if any(stop - start < few for (start, stop), few in zip(itertools.pairwise(edges), least, strict=True)):
        raise InvalidRequestError(f"a graph of {n} ops, {begins} of its encoder, cannot be cut at {list(places)}")
    encoder, boundary = graph.ops[: begins - 1] if begins else [], graph.ops[begins - 1 : begins]
    own = [graph.ops[start:stop] for start, stop in itertools.pairwise(edges)]
    # What attention reads of earlier stages is stored again in its own: the keys and values are sent.
    again = [_stores(graph.ops[begins:start], ops) for start, ops in zip(edges, own, strict=False)]
    texts = [encoder, *(_stores(encoder, ops) for ops in own[1:])]
    bodies = _joined(graph, [[*stores, *ops] for stores, ops in zip(again, own, strict=True)])
    heads = _joined(graph, texts) if begins else [[] for _ in own]
    stages = []
    for head, body in zip(heads, bodies, strict=True):
        ops = [*head, *boundary, *body]
        layers = {op.layer for op in ops if hasattr(op, "layer")}
        stages.append(StageGraph(graph, ops, Held(frozenset(layers), frozenset(_states(ops)))))
    return stages


def _states(ops: Iterable[Op]) -> set[int]:
    return {op.state for op in ops if hasattr(op, "state")}


def _stores(before: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """Ops before that store what `ops` read of the cache."""
    layers = {op.layer for op in ops if hasattr(op, "layer")}
    return [op for op in before if isinstance(op, Store) and op.layer in layers]


def _joined(graph: Graph, parts: Sequence[list[Op]]) -> list[list[Op]]:
    made: dict[Value, None] = {}
    crossing: list[list[Value]] = [[]]
    for i, part in enumerate(parts[:-1], start=1):
        made |= {op.out: None for op in part}
        read = {value for later in parts[i:] for op in later for value in op.inputs()}
        crossing.append([value for value in made if value in read])
    joined = []
    for i, (part, values) in enumerate(zip(parts, crossing, strict=True)):
        firsts = itertools.accumulate((value.width for value in values), initial=0)
        ops: list[Op] = [Received(value, first) for value, first in zip(values, firsts, strict=False)]
        ops += part
        if i + 1 < len(parts):
            sent = crossing[i + 1]
            ops.append(Sent(graph.value(sum(value.width for value in sent)), tuple(sent)))
        joined.append(ops)
    return joined

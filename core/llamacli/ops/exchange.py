"""Values whose columns are divided among nodes, and their exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.base import MakeParam, Op, Recorder
from llamacli.ops.lowering import Array, HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Value

Edges = tuple[int, ...]
"""Columns at which the part of each node begins, and the width."""


class Exchange(Protocol):
    """Exchange of parts among nodes, all in the same order."""

    def __call__(self, own: npt.NDArray[np.float32], widths: Sequence[int], *, to_first: bool) -> Sequence[Array]:
        """Give the own part to the others; all parts, in order.

        Parts are float32 [n, width], with the `widths` of the nodes. With `to_first`, only the first node gets parts,
        and others get none.
        """


@attrs.frozen(eq=False)
class Gather:
    """All-gather of values, by the `edges` of each.

    No sums are divided, so that the numbers are as on one node.
    """

    edges: tuple[Edges, ...]
    exchange: Exchange
    to_first: bool = False
    _widths: list[int] = attrs.field(init=False)
    _columns: list[list[tuple[slice, slice]]] = attrs.field(init=False)
    """Of each node and value: columns of the result and of the part."""

    def __attrs_post_init__(self) -> None:
        firsts, columns = [0, *itertools.accumulate(edges[-1] for edges in self.edges)], []
        for node in range(len(self.edges[0]) - 1):
            at, own = 0, []
            for first, edges in zip(firsts, self.edges, strict=False):
                start, stop = edges[node], edges[node + 1]
                own.append((slice(first + start, first + stop), slice(at, at + stop - start)))
                at += stop - start
            columns.append(own)
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_widths", [own[-1][1].stop for own in columns])

    def into(self, out: Array, own: Array) -> None:
        """Write all columns of the values, side by side.

        `own` has this node's columns of them, side by side too.
        """
        parts = self.exchange(own, self._widths, to_first=self.to_first)
        for part, columns in zip(parts, self._columns, strict=False):
            for target, source in columns:
                out[:, target] = part[:, source]

    def whole(self, own: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
        """All columns of the values."""
        out = np.zeros((len(own), sum(edges[-1] for edges in self.edges)), np.float32)
        self.into(out, own.astype(np.float32))
        return out


@attrs.frozen(eq=False)
class Gathered(Op):
    """out = values side by side, of which each node has computed columns.

    `parts` are this node's, without values of which it has none.
    """

    parts: tuple[Value, ...]
    gather: Gather

    def compute(self, run: Run) -> npt.NDArray[np.floating[Any]]:
        return self.gather.whole(np.concatenate([np.empty((run.n, 0)), *(run[part] for part in self.parts)], 1))

    def lower(self, to: Lowering) -> None:
        out, parts, gather = f32(self.out), [f32(part) for part in self.parts], self.gather

        def exchange(rows: HostRows, at: Callable[[Slot], Array]) -> None:
            some = slice(rows.first, rows.stop)
            own = [at(part)[some, : part.width] for part in parts] or [
                np.empty((rows.stop - rows.first, 0), np.float32)
            ]
            gather.into(at(out)[some], own[0] if len(own) == 1 else np.concatenate(own, 1))

        to.host_step(exchange, parts, [out])

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for n_nodes in (1, 2):  # another node has the same columns

            def exchange(own: npt.NDArray[np.float32], widths: Sequence[int], *, to_first: bool) -> Sequence[Array]:
                return [own for _ in widths]

            edges = tuple(x.width * node for node in range(n_nodes + 1))
            yield g.record(Gathered(g.value(edges[-1]), (x,), Gather((edges,), exchange)))

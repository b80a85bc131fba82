"""Example graphs of every op, recorded from `Op.examples`.

Used to compile the op's kernels and to compare them with NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.graph import Graph
from llamacli.ops.base import Op
from llamacli.ops.values import Param, Tensor, Value

N_VOCAB, WIDTH = 20, 48


@attrs.frozen(eq=False)
class Example:
    """Example of an op: a graph and random weights.

    The graph's last op computes it; `weights` are float32 by name.
    """

    op: type[Op]
    number: int
    graph: Graph
    weights: dict[str, npt.NDArray[np.float32]]


def op_classes() -> list[type[Op]]:
    """List the op classes of all imported modules, the plugins' included."""
    found: list[type[Op]] = []
    pending: list[type[Op]] = [Op]  # type: ignore[type-abstract]  # only asked for its subclasses
    while pending:
        subclasses = pending.pop().__subclasses__()
        found += subclasses
        pending += subclasses
    return sorted(found, key=lambda op: (op.__module__, op.__name__))


def examples_of(op: type[Op]) -> Iterator[Example]:
    """Yield each example of an op in a graph of its own."""
    for number in itertools.count():
        graph, weights = Graph(), dict[str, npt.NDArray[np.float32]]()
        random = np.random.default_rng(number)

        def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
            weights[name] = random.normal(0, 0.3, shape).astype(np.float32)  # noqa: B023 - called within this round
            return Tensor(name, shape)

        def param(name: str, *shape: int, bias: bool = False) -> Param:
            biases = shape if len(shape) == 1 else shape[:-1]
            return Param(tensor(f"{name}.weight", shape), tensor(f"{name}.bias", biases) if bias else None)

        x = graph.embed(param("token_embd", N_VOCAB, WIDTH))
        found: Value | None = next(itertools.islice(op.examples(graph, x, param), number, None), None)
        if found is None:
            return
        yield Example(op, number, graph, weights)

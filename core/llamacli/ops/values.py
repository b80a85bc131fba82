"""Symbolic values, parameters and tensors, which ops read and write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import PluginError

Array = npt.NDArray[np.float64]


@attrs.frozen
class Tensor:
    """Tensor of the model file, or a range of its rows.

    Its full name, and its shape with rows first, (n_out, n_in). `first_row` is where the rows begin in the stored
    tensor; `row_axis` is the axis that counts rows, the last but one in weights and the last in biases. `group` is the
    index of one matrix, or its bias, where the stored tensor has several.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    row_axis: int = -2
    group: int | None = None

    def rows_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Select this tensor's rows of the whole stored array."""
        array = array if self.group is None else array[self.group]
        if array.size == math.prod(self.shape):
            return array.reshape(self.shape)
        rows = slice(self.first_row, self.first_row + self.shape[self.row_axis])
        return array[..., rows, :] if self.row_axis == -2 else array[..., rows]


@attrs.frozen(eq=False)
class Param:
    """Model parameter: weight, bias and scale.

    `bias` and `scale` are None where the file has none. Absent optional parameters are None instead.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def reshaped(self, *shape: int) -> Param:
        """Parameter of the same numbers in another shape, without bias or scale.

        Raises PluginError if the shape has more or fewer numbers.
        """
        if math.prod(shape) != math.prod(self.weight.shape):
            raise PluginError(f"{self.weight.name} {self.weight.shape} cannot be reshaped to {shape}")
        return Param(attrs.evolve(self.weight, shape=shape))

    def split(self, *n_rows: int) -> list[Param]:
        """Split fused parameters: `q, k, v = attn_qkv.split(n_q, n_kv, n_kv)`.

        They are stored one below the other. Raises PluginError if the rows do not add up, or if the parameter has a
        scale.
        """
        have = self.weight.shape[-2]
        if sum(n_rows) != have:
            raise PluginError(f"{self.weight.name} has {have} rows; it cannot be split into {sum(n_rows)}")
        firsts = [sum(n_rows[:i]) for i in range(len(n_rows))]
        return [
            Param(
                attrs.evolve(self.weight, shape=(*self.weight.shape[:-2], n, self.weight.shape[-1]), first_row=first),
                self.bias and attrs.evolve(self.bias, shape=(*self.bias.shape[:-1], n), first_row=first, row_axis=-1),
                self.scale,
            )
            for first, n in zip(firsts, n_rows, strict=True)
        ]

    def matrix(self, group: int) -> Param:
        """Single matrix, with its bias, of a parameter that has several.

        The parameter is (n_groups, n_out, n_in). Raises PluginError if there is no such matrix, or if the parameter has
        a scale.
        """
        shape = self.weight.shape
        if len(shape) != 3 or not 0 <= group < shape[0] or self.scale:
            raise PluginError(f"{self.weight.name} {shape} has no matrix {group}, or it has a scale")
        bias = self.bias and attrs.evolve(self.bias, shape=self.bias.shape[1:], group=group)
        return Param(attrs.evolve(self.weight, shape=shape[1:], group=group), bias)


@attrs.frozen
class LowRank:
    """Low-rank change of a matrix (LoRA, Hu et al. 2021).

    The matrix becomes weight + scale * b @ a. `a` is (rank, n_in) and `b` (n_out, rank), with the number of experts in
    front where the weight has it. In tables of embeddings `a` is (n_vocab, rank) and `b` (n_embd, rank): a token's row
    changes by scale * b @ a[token].
    """

    a: Tensor
    b: Tensor
    scale: float


LowRanks = tuple[LowRank, ...]
"""Low-rank changes of one matrix; they are added."""

Adapt = Callable[[Tensor], LowRanks]
"""Low-rank changes of a tensor of the model, () for none."""


class Adds(Protocol):
    """The part of a graph that a value's own operators use."""

    def add(self, a: Value, b: Value) -> Value:
        """Record a + b."""


@attrs.frozen(eq=False)
class Value:
    """Symbolic activation, float32 [n_tokens, width].

    It has no numbers while a forward pass is recorded.
    """

    graph: Adds = attrs.field(repr=False)
    width: int

    def __add__(self, other: Value) -> Value:
        if not isinstance(other, Value):
            raise PluginError(_advice("+", self, other))
        return self.graph.add(self, other)


_VERBS: dict[str, tuple[tuple[str, str], ...]] = {
    "+": (("add", "g.add(x, param) adds a vector of the file"),),
    "-": (("scale", "a - b is a + g.scale(b, -1)"),),
    "*": (
        ("scale", "g.scale(x, number) multiplies by a number"),
        ("mul", "g.mul(x, y) multiplies element by element"),
        ("linear", "g.linear(x, param) is the product with a matrix"),
    ),
    "/": (("scale", "g.scale(x, 1 / number) divides by a number"),),
    "@": (("linear", "g.linear(x, param) computes x @ weight.T"),),
    "[]": (("columns", "g.columns(x, first, width) selects columns"),),
    "a function": (("map", "g.map(x, function) applies a function of llamacli.ops.activations"),),
}
"""Verbs that do what an operator of Python does with arrays, with their uses."""

_OPERATORS = {
    "+": ("__radd__",),
    "-": ("__sub__", "__rsub__", "__neg__"),
    "*": ("__mul__", "__rmul__"),
    "/": ("__truediv__", "__rtruediv__"),
    "@": ("__matmul__", "__rmatmul__"),
    "[]": ("__getitem__", "__setitem__", "__iter__"),
    "a function": (
        "__pow__", "__rpow__", "__abs__", "__float__", "__int__", "__array__", "__array_ufunc__",
        "__lt__", "__le__", "__gt__", "__ge__",
    ),
}  # fmt: skip


def _advice(operator: str, value: Value, *operands: object) -> str:
    """Error message: verbs of the graph instead of an operator."""
    known = [use for verb, use in _VERBS[operator] if hasattr(value.graph, verb)]
    found = " and ".join(type(operand).__name__ for operand in operands)
    return f"{operator} of a value{f' and {found}' if found else ''} is not recorded: {'; '.join(known)}"


def _refuse(operator: str) -> Callable[..., Any]:
    def method(self: Value, *operands: object) -> Any:
        raise PluginError(_advice(operator, self, *operands[:1]))

    return method


for _operator, _methods in _OPERATORS.items():
    for _method in _methods:
        if _method not in vars(Value):
            setattr(Value, _method, _refuse(_operator))

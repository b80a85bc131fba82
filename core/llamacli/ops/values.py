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
"""Array of float64."""


@attrs.frozen
class Tensor:
    """Tensor of the model file, or a range of its rows.

    - `name`: its full name in the file; `shape`: rows first, (n_out, n_in).
    - `group`: the index of one matrix, or its bias, where the stored tensor has several.
    - `whole`: where only rows from `first_row` on are meant, the shape of the tensor or matrix that they are rows of;
      `row_axis` is the axis that counts them, the last but one in weights and the last in biases.
    - `stored_width`: numbers of a stored row where `shape` has rows of another length, else 0.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    row_axis: int = -2
    group: int | None = None
    whole: tuple[int, ...] = ()
    stored_width: int = 0

    def rows_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Select this tensor's rows of the whole stored array.

        Raises PluginError if the array has other numbers than the shapes say.
        """
        whole = self.whole or self.shape
        n_groups, rest = divmod(array.size, math.prod(whole) or 1)
        found = array.shape
        if not rest and (self.group or 0) < n_groups and (self.group is not None or n_groups == 1):
            part = array.reshape(n_groups, *whole)[self.group or 0]
            if self.whole:
                n_rows = math.prod(self.shape) * whole[self.row_axis] // math.prod(whole)
                rows = slice(self.first_row, self.first_row + n_rows)
                part = part[..., rows, :] if self.row_axis == -2 else part[..., rows]
            if part.size == math.prod(self.shape):
                return part.reshape(self.shape)
            found = part.shape
        raise PluginError(f"{self.name}: {self.shape} cannot be read of a stored tensor {found}")


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

        `split` and `matrix` of it count rows and matrices of the new shape. It can be a factor of matrix products only
        if its rows are as long as the stored ones. Raises PluginError if the shape has more or fewer numbers.
        """
        weight = self.weight
        if min(shape, default=0) < 1 or math.prod(shape) != math.prod(weight.shape):
            raise PluginError(f"{weight.name} {weight.shape} cannot be reshaped to {shape}")
        stored = weight.stored_width or weight.shape[-1]
        is_matrix = shape[-1] == stored and not weight.whole
        return Param(attrs.evolve(weight, shape=shape, stored_width=0 if is_matrix else stored))

    def split(self, *n_rows: int) -> list[Param]:
        """Split fused parameters: `q, k, v = attn_qkv.split(n_q, n_kv, n_kv)`.

        They are stored one below the other. Raises PluginError if the rows do not add up, or if it has no rows.
        """
        weight, bias = _divisible(self.weight), self.bias
        have = weight.shape[-2] if len(weight.shape) > 1 else 0
        if sum(n_rows) != have or min(n_rows, default=0) < 1:
            parts = " + ".join(map(str, n_rows))
            raise PluginError(f"{weight.name} {weight.shape} has {have} rows; it cannot be split into {parts}")
        firsts = [sum(n_rows[:i]) for i in range(len(n_rows))]
        return [
            Param(
                _rows(weight, (*weight.shape[:-2], n, weight.shape[-1]), first, -2),
                bias and _rows(bias, (*bias.shape[:-1], n), first, -1),
                self.scale,
            )
            for first, n in zip(firsts, n_rows, strict=True)
        ]

    def matrix(self, group: int) -> Param:
        """Single matrix, with its bias, of a parameter that has several.

        The parameter is (n_groups, n_out, n_in). Raises PluginError if there is no such matrix, or if the parameter has
        a scale.
        """
        weight, bias = _divisible(self.weight), self.bias
        shape = weight.shape
        if len(shape) != 3 or not 0 <= group < shape[0] or self.scale or weight.group is not None:
            raise PluginError(f"{weight.name} {shape} has no matrix {group}, or it has a scale")
        return Param(_group(weight, group), bias and _group(bias, group))


def _divisible(tensor: Tensor) -> Tensor:
    shape, whole = tensor.shape, tensor.whole
    if whole and (shape[:-2], shape[-1]) != (whole[:-2], whole[-1]):
        raise PluginError(f"{tensor.name}: {shape}, made of rows of {whole}, has no rows: reshape first, then split")
    return tensor


def _rows(tensor: Tensor, shape: tuple[int, ...], first: int, axis: int) -> Tensor:
    whole = tensor.whole or tensor.shape
    return attrs.evolve(tensor, shape=shape, whole=whole, first_row=tensor.first_row + first, row_axis=axis)


def _group(tensor: Tensor, group: int) -> Tensor:
    return attrs.evolve(tensor, shape=tensor.shape[1:], whole=tensor.whole[1:], group=group)


@attrs.frozen
class LowRank:
    """Low-rank change of a matrix (LoRA, Hu et al. 2021).

    The matrix becomes weight + ratio * scale * b @ a. `a` is (rank, n_in) and `b` (n_out, rank), with the number of
    experts in front where the weight has it. In tables of embeddings `a` is (n_vocab, rank) and `b` (n_embd, rank): a
    token's row changes by ratio * scale * b @ a[token]. `scale` is number `adapter` of the `Span.adapter_scales` of the
    tokens, so that tokens of one batch may have different ones.
    """

    a: Tensor
    b: Tensor
    ratio: float
    adapter: int = 0


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

    def __radd__(self, other: object) -> Value:
        if isinstance(other, int) and other == 0:
            return self  # sum(values) begins with 0
        raise PluginError(_advice("+", self, other))

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
    "/": (("div", "g.div(x, y) divides element by element"), ("scale", "g.scale(x, 1 / number) divides by a number")),
    "@": (("linear", "g.linear(x, param) computes x @ weight.T"),),
    "[]": (("columns", "g.columns(x, first, width) selects columns"),),
    "a function": (("map", "g.map(x, function) applies a function, such as llamacli.plugin.silu"),),
}
"""Verbs that do what an operator of Python does with arrays, with their uses."""

_OPERATORS = {
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

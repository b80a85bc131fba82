"""Base class of ops, and the recorder of graphs.

A plugin's `forward` runs once, when a model is loaded, on symbolic values that hold no numbers. Each verb that it calls
records an operation, an `Op`. Engines run ops without knowing their classes: an op computes itself in NumPy
(`Op.compute`) and says which kernel steps compute it (`Op.lower`).
"""

from __future__ import annotations

import abc
import numbers
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, Self

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import PluginError
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.ops.key_shift import KeyShift
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Adapt, LowRank, Param, Tensor, Value


class Recorder(abc.ABC):
    """Recorder of a forward pass: its ops and caches.

    See `llamacli.graph.Graph`.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.states: list[KVSpec] = []
        self.recurrent: list[RecurrentSpec] = []
        self.passed: Value | None = None
        """Value that a draft head reads, or one that a head passes to itself; None for what the output layer reads."""

    def value(self, width: int) -> Value:
        """A new value of `width` numbers a token."""
        return Value(self, width)

    def record(self, op: Op) -> Value:
        """Append an op; returns its `out`.

        Raises PluginError naming the field of the op that has a wrong type, a value of another graph, or a factor of
        matrix products whose rows are not those of the file.
        """
        op = _checked(op)
        for value in op.inputs():
            if value.graph is not self and all(value is not other.out for other in self.ops):
                raise PluginError(f"{verb_of(op)}: a value of width {value.width} belongs to another forward pass")
        for tensor in op.matrices():
            if tensor.stored_width:
                stored = f"rows of {tensor.stored_width} numbers in the file"
                raise PluginError(f"{verb_of(op)}: {tensor.name}, {stored}, cannot be a matrix {tensor.shape}")
        self.ops.append(op)
        return op.out

    def recurrent_state(self, name: str, *shape: int) -> int:
        """Number of a new recurrent state, float32 of this shape."""
        expect("recurrent_state", all(n > 0 for n in shape), f"{name} of shape {shape}")
        self.recurrent.append(RecurrentSpec(name, shape))
        return len(self.recurrent) - 1

    @abc.abstractmethod
    def add(self, a: Value, b: Value) -> Value:
        """Record a + b."""


class MakeParam(Protocol):
    """Makes a random parameter for an example: `param("w", n_out, n_in, bias=True)`."""

    def __call__(self, name: str, *shape: int, bias: bool = False) -> Param:
        """A parameter named `{name}.weight`, and `{name}.bias` with `bias`."""


@attrs.frozen(eq=False)
class Op(abc.ABC):
    """Recorded operation that computes the value `out`.

    Its other fields are what it reads: values, tensors of the file, numbers. A subclass defines `compute`; `lower`
    makes it fast. One that only defines `compute` runs too, in NumPy.
    """

    mixes_tokens: ClassVar[bool] = False
    """True if it reads or writes what other tokens left behind. All rows of a batch are computed up to the last such
    op; behind it only the rows whose logits are asked for."""

    uses_position: ClassVar[bool] = False
    """True if its result depends on the tokens' positions, as that of RoPE does."""

    out: Value

    def tensors(self) -> list[Tensor]:
        """Tensors of the model that it reads."""
        return [value for value in self._reads() if isinstance(value, Tensor)]

    def inputs(self) -> list[Value]:
        """Values that it reads."""
        return [value for value in self._reads() if isinstance(value, Value)]

    def matrices(self) -> list[Tensor]:
        """Tensors that modes q8 and q4 may round.

        They are those of `tensors()` that are factors of matrix products.
        """
        return []

    def exact_inputs(self) -> list[Value]:
        """Inputs whose matrices are never rounded.

        Small errors in them would change a choice (of experts).
        """
        return []

    def adapted(self, adapt: Adapt) -> Self:
        """The op with low-rank changes of its matrices (LoRA adapters).

        `adapt` is asked for the changes of each tensor that can have some; by default there is none.
        """
        return self

    def context_lengths(self) -> list[int]:
        """Context lengths beyond which other constants apply (LongRoPE's factors)."""
        return []

    def max_positions(self) -> int | None:
        """Number of positions that it can compute, None for any number."""
        return None

    @property
    def needs_whole_input(self) -> bool:
        """True if a token's result depends on tokens behind it.

        Inputs of such a model are evaluated at once, which embedding models do.
        """
        return False

    @property
    def uses_distance(self) -> bool:
        """True if it measures distances in cells, as ALiBi does."""
        return False

    @property
    def n_components(self) -> int:
        """Number of position components that it reads: 1, or 4 for M-RoPE."""
        return 1

    @property
    def n_merged(self) -> int:
        """Number of rows that become one row of the result."""
        return 1

    @abc.abstractmethod
    def compute(self, run: Run) -> npt.NDArray[np.floating[Any]]:
        """Compute `out` in NumPy, [n, out.width].

        `run[x]` is a value or a tensor in float64. The result is rounded to float32.
        """

    def lower(self, to: Lowering) -> None:
        """Append the kernel steps that compute `out`.

        An op that does not define this runs `compute`.
        """
        to.host_op(self.compute, self.inputs(), self.out)

    def shift_keys(self, keys: npt.NDArray[np.float32], shift: KeyShift) -> npt.NDArray[np.float32] | None:
        """Shift cached keys to lower positions (K-shift).

        `keys` are rows of `out` as attention caches them. Called only where `out` depends on positions. float32
        [n_head_kv, head_dim, n]; None if it cannot be done.
        """
        return None

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """Record small examples of the op on `x`.

        Each yields its result. They are compiled by `llamacli warmup` and compared with `compute` by the tests.
        """
        return iter(())

    def _reads(self) -> Iterator[object]:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name != "out":
                for part in value if isinstance(value, tuple) else (value,):
                    yield from (part.a, part.b) if isinstance(part, LowRank) else (part,)


LARGEST = float(np.finfo(np.float32).max)
"""Largest number that kernels can compute with."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest positive number whose inverse kernels can compute."""

_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "float": (numbers.Real,),
    "int": (numbers.Integral,),
    "bool": (bool, np.bool_),
    "Tensor": (Tensor,),
    "Value": (Value,),
    "None": (type(None),),
}
"""Types that the fields of ops are checked for, by the name that their annotation has."""


def _checked(op: Op) -> Op:
    """Check the types of an op's fields.

    Returns it with integers made float where a float is declared. Kernels get addresses of arrays and the bits of
    numbers, so that a wrong type would compute something else.
    """
    floats: dict[str, Any] = {}
    for field in attrs.fields(type(op)):
        value: Any = getattr(op, field.name)
        names = str(getattr(field.type, "__name__", field.type)).replace(" ", "").split("|")
        known = [kind for name in names for kind in _FIELD_TYPES.get(name, ())]
        complete = all(name in _FIELD_TYPES for name in names)
        if isinstance(value, np.ndarray) or (complete and not isinstance(value, tuple(known))):
            raise PluginError(f"{verb_of(op)}: {field.name} must be {_listed(names)}, not {_shown(value)}")
        if isinstance(value, numbers.Real) and value != value:
            raise PluginError(f"{verb_of(op)}: {field.name} must be a number, not NaN")
        if "float" in names and value is not None and type(value) is not float and not isinstance(value, Tensor):
            floats[field.name] = float(value)
    return attrs.evolve(op, **floats) if floats else op


def _listed(names: list[str]) -> str:
    plain = {"float": "a number", "int": "an integer", "Tensor": "a tensor of the file", "Value": "a value"}
    return " or ".join(plain.get(name, name) for name in names)


def _shown(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def verb_of(op: Op) -> str:
    """Name of the verb that records an op: `rms_norm` for RmsNorm."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", type(op).__name__).lower()


def expect_number(verb: str, name: str, value: object, minimum: float, maximum: float) -> None:
    """Raise PluginError unless an argument is a number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not minimum <= float(value) <= maximum:
        limits = f"from {minimum:g} to {maximum:g}"
        raise PluginError(f"{verb}: {name} must be a number {limits}, not {_shown(value)}")


def param_of(verb: str, param: object) -> Param:
    """The parameter that a verb was given.

    Raises PluginError for anything else, such as None for an optional tensor that the file lacks.
    """
    if isinstance(param, Param):
        return param
    if param is None:
        raise PluginError(f"{verb}: the parameter is None; check optional ones, which a file may lack")
    raise PluginError(f"{verb}: {_shown(param)} is no parameter; weights.NAME is one, and Param(tensor) makes one")


def expect(verb: str, holds: bool, found: str) -> None:
    """Raise PluginError unless the operands of a verb fit.

    `found` names them and their sizes.
    """
    if not holds:
        raise PluginError(f"{verb}: {found} do not fit together")

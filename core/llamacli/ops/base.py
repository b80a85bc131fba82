"""Base class of ops, and the recorder of graphs.

A plugin's `forward` runs once, when a model is loaded, on symbolic values that hold no numbers. Each verb that it calls
records an operation, an `Op`. Engines run ops without knowing their classes: an op computes itself in NumPy
(`Op.compute`) and says which kernel steps compute it (`Op.lower`).
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import PluginError
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.ops.key_shift import KeyShift
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Param, Tensor, Value


class Recorder(abc.ABC):
    """Recorder of a forward pass: its ops and caches.

    See `llamacli.graph.Graph`.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.states: list[KVSpec] = []
        self.recurrent: list[RecurrentSpec] = []

    def value(self, width: int) -> Value:
        """A new value of `width` numbers a token."""
        return Value(self, width)

    def record(self, op: Op) -> Value:
        """Append an op; returns its `out`."""
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
                yield from value if isinstance(value, tuple) else (value,)


def expect(verb: str, holds: bool, found: str) -> None:
    """Raise PluginError unless the operands of a verb fit.

    `found` names them and their sizes.
    """
    if not holds:
        raise PluginError(f"{verb}: {found} do not fit together")

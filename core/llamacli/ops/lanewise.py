"""Elementwise ops: one formula for NumPy arrays and vector registers.

The reference runs it on arrays, a kernel on registers. A formula is a function of a vocabulary `v` and its operands,
written with +, -, *, /, comparisons and the functions of `Vocabulary`. `v.exp` is NumPy's on arrays; in a kernel it
emits the instructions for 16 lanes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.layout import ACTIVATION_BLOCK
from llamacli.ops.base import Op, expect
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Tensor, Value


class Vocabulary(Protocol):
    """Functions that a formula may call besides the operators.

    Each works element by element.
    """

    def exp(self, x: Any) -> Any:
        """e^x; kernels bound x to -87 and 88."""

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e^-x)."""

    def tanh(self, x: Any) -> Any:
        """1 - 2 / (e^2x + 1)."""

    def log(self, x: Any) -> Any:
        """Natural logarithm of a positive normal number."""

    def sqrt(self, x: Any) -> Any:
        """Square root."""

    def absolute(self, x: Any) -> Any:
        """|x|."""

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of x and y."""

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of x and y."""

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z; kernels round once."""

    def where(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """`then` where the condition, a comparison, holds, else `otherwise`."""


class ArrayVocabulary:
    """Vocabulary of NumPy arrays."""

    exp, tanh, log, sqrt, absolute = np.exp, np.tanh, np.log, np.sqrt, np.abs
    minimum, maximum, where = np.minimum, np.maximum, staticmethod(np.where)

    @staticmethod
    def sigmoid(x: Any) -> Any:
        """See Vocabulary."""
        return 1 / (1 + np.exp(-x))

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Any:
        """See Vocabulary."""
        return x * y + z


ARRAYS = ArrayVocabulary()

Formula = Callable[..., Any]


def on_arrays(formula: Formula, *operands: Any) -> npt.NDArray[np.float64]:
    """Evaluate a formula on float64 arrays, to its limits where exp overflows."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        result: npt.NDArray[np.float64] = formula(ARRAYS, *operands)
    return result


@attrs.frozen(eq=False)
class Lanewise(Op):
    """Elementwise op.

    Its result at each element depends on the same element of its inputs alone.

    A subclass has up to 4 operands and 4 constants as fields, and a `formula` that takes them in that order, operands
    first. An operand is a value as wide as `out`, a value of width 1 (a number a token), or a tensor as wide as `out`.
    A constant is a float, or a tensor of one number. Other fields choose the formula.
    """

    verb: ClassVar[str] = "lanewise"
    """Name of the kernels."""

    @abc.abstractmethod
    def formula(self, v: Vocabulary, *operands: Any) -> Any:
        """Compute one element; `v` has the functions that arrays and registers share."""

    def operands(self) -> list[Value | Tensor]:
        """Inputs that differ between elements, in order of the fields."""
        return [x for x in self._reads() if isinstance(x, Value) or (isinstance(x, Tensor) and x.shape != (1,))]

    def constants(self) -> list[float | Tensor]:
        """Numbers that all elements share."""
        return [x for x in self._reads() if isinstance(x, float) or (isinstance(x, Tensor) and x.shape == (1,))]

    def _code(self) -> Iterator[object]:
        """Kinds of the operands and all other fields."""
        for x in self._reads():
            yield (type(x), getattr(x, "shape", None) == (1,)) if isinstance(x, Value | Tensor) else x

    def compute(self, run: Run) -> npt.NDArray[np.float64]:
        constants = [c if isinstance(c, float) else float(run[c][0]) for c in self.constants()]
        return on_arrays(self.formula, *(run[x] for x in self.operands()), *constants)

    def lower(self, to: Lowering) -> None:
        constants = [c if isinstance(c, float) else float(to.vector(c)[0]) for c in self.constants()]
        operands = [x if isinstance(x, Tensor) else f32(x) for x in self.operands()]
        lower_lanewise(to, self.verb, self.formula, operands, f32(self.out), constants, key=(type(self), *self._code()))


def lower_lanewise(
    to: Lowering,
    name: str,
    formula: Formula,
    operands: Sequence[Slot | Tensor],
    out: Slot,
    constants: Sequence[float] = (),
    *,
    key: object = None,
) -> None:
    """Append the kernel step of a formula.

    Formulas of equal `key` (default: the formula) are the same code.
    """
    from llamacli.kernels.lanewise import CONSTANTS, LANEWISE, OPERANDS, lanewise

    widths = [x.width if isinstance(x, Slot) else x.shape[-1] for x in operands]
    expect(name, len(operands) <= len(OPERANDS) and len(constants) <= len(CONSTANTS), f"{len(operands)} operands")
    expect(name, all(width in (1, out.width) for width in widths), f"operands of widths {widths} and {out.width}")
    is_scalar = tuple(width == 1 and out.width > 1 for width in widths)
    read = [to.vector(x).reshape(-1) if isinstance(x, Tensor) else x for x in operands]
    fields: dict[str, Any] = dict.fromkeys((*OPERANDS, *CONSTANTS))
    fields |= dict(zip(OPERANDS, read, strict=False)) | dict(zip(CONSTANTS, constants, strict=False))
    kernel = lanewise(name, formula, is_scalar, len(constants), formula if key is None else key)
    to.step(kernel, LANEWISE, out=out, width=out.width, slots=out.slots, **fields, work_unit=ACTIVATION_BLOCK)

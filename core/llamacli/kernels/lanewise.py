"""Elementwise kernels, built by running a formula on vector registers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir as llvm

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, intrinsic, types
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ACTIVATION_BLOCK, LANES, RUN, record
from llamacli.kernels.work import rows_of, share

MAX_OPERANDS = MAX_CONSTANTS = 4

OPERANDS = tuple(f"x{i}" for i in range(MAX_OPERANDS))
CONSTANTS = tuple(f"c{i}" for i in range(MAX_CONSTANTS))

LANEWISE = record(
    *OPERANDS, *(f"{name}_stride" for name in OPERANDS), "out", "out_stride", "width", "slots",
    **dict.fromkeys(CONSTANTS, np.float32),
)  # fmt: skip
"""Operands: their addresses, and the bytes between their rows, 0 for a vector that all rows share; then constants."""


class Register:
    """Vector register of 16 float32 lanes while a kernel is built.

    Operators emit instructions; numbers are the same in all lanes.
    """

    def __init__(self, b: ir.Builder, value: ir.Value):
        self.b, self.value = b, value

    def of(self, x: Register | float) -> ir.Value:
        """The lanes of an operand."""
        return x.value if isinstance(x, Register) else ir.constant(ir.F32X16, float(x))

    def _with(self, emit: Callable[[ir.Value, ir.Value], ir.Value], x: Any, y: Any) -> Register:
        return Register(self.b, emit(self.of(x), self.of(y)))

    def __add__(self, other: Register | float) -> Register:
        return self._with(self.b.fadd, self, other)

    def __radd__(self, other: float) -> Register:
        return self._with(self.b.fadd, other, self)

    def __sub__(self, other: Register | float) -> Register:
        return self._with(self.b.fsub, self, other)

    def __rsub__(self, other: float) -> Register:
        return self._with(self.b.fsub, other, self)

    def __mul__(self, other: Register | float) -> Register:
        return self._with(self.b.fmul, self, other)

    def __rmul__(self, other: float) -> Register:
        return self._with(self.b.fmul, other, self)

    def __truediv__(self, other: Register | float) -> Register:
        return self._with(self.b.fdiv, self, other)

    def __rtruediv__(self, other: float) -> Register:
        return self._with(self.b.fdiv, other, self)

    def __neg__(self) -> Register:
        return 0.0 - self

    def _compare(self, sign: str, other: Register | float) -> Mask:
        return Mask(self.b.fcmp_ordered(sign, self.value, self.of(other)))

    def __lt__(self, other: Register | float) -> Mask:
        return self._compare("<", other)

    def __le__(self, other: Register | float) -> Mask:
        return self._compare("<=", other)

    def __gt__(self, other: Register | float) -> Mask:
        return self._compare(">", other)

    def __ge__(self, other: Register | float) -> Mask:
        return self._compare(">=", other)


class Mask:
    """The result of a comparison, for `where`."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __bool__(self) -> bool:
        raise TypeError("a formula chooses with v.where(condition, then, otherwise), not with if, and, or, not")


class RegisterVocabulary:
    """The functions of `llamacli.ops.lanewise.Vocabulary` on registers."""

    def __init__(self, b: ir.Builder):
        self._b, self._zero = b, Register(b, ir.constant(ir.F32X16, 0.0))

    def __getattr__(self, name: str) -> Any:
        offered = ", ".join(name for name in vars(type(self)) if not name.startswith("_"))
        raise AttributeError(f"formulas have no function {name!r}; there are {offered}")

    def _emit(self, emit: Callable[..., ir.Value], *operands: Register | float) -> Register:
        return Register(self._b, emit(self._b, *(self._zero.of(x) for x in operands)))

    def exp(self, x: Register | float) -> Register:
        """e^x."""
        return self._emit(ir.exp, x)

    def sigmoid(self, x: Register | float) -> Register:
        """1 / (1 + e^-x)."""
        return 1.0 / (1.0 + self.exp(0.0 - (self._zero + x if not isinstance(x, Register) else x)))

    def tanh(self, x: Register | float) -> Register:
        """1 - 2 / (e^2x + 1)."""
        return 1.0 - 2.0 / (self.exp(2.0 * x) + 1.0)

    def log(self, x: Register | float) -> Register:
        """Natural logarithm."""
        return self._emit(ir.log, x)

    def sqrt(self, x: Register | float) -> Register:
        """Square root."""
        return self._emit(ir.sqrt, x)

    def absolute(self, x: Register | float) -> Register:
        """|x|."""
        return self._emit(ir.absolute, x)

    def minimum(self, x: Register | float, y: Register | float) -> Register:
        """The smaller one."""
        return self._emit(ir.minimum, x, y)

    def maximum(self, x: Register | float, y: Register | float) -> Register:
        """The larger one."""
        return self._emit(ir.maximum, x, y)

    def fma(self, x: Register | float, y: Register | float, z: Register | float) -> Register:
        """x * y + z."""
        return self._emit(ir.fma, x, y, z)

    def where(self, condition: Mask, then: Register | float, otherwise: Register | float) -> Register:
        """`then` where the condition holds, else `otherwise`."""
        return Register(self._b, self._b.select(condition.value, self._zero.of(then), self._zero.of(otherwise)))


Formula = Callable[..., Any]

_kernels: dict[object, Kernel] = {}


def lanewise(name: str, formula: Formula, is_scalar: Sequence[bool], n_constants: int, key: object) -> Kernel:
    """Kernel of an elementwise formula.

    A unit of work is 32 elements; `is_scalar` operands have one number a row. Formulas of equal `key` are the same
    code. The kernel's name carries a digest of its instructions.
    """
    chosen = key, tuple(is_scalar), n_constants
    if chosen not in _kernels:
        kinds = "".join("s" if scalar else "v" for scalar in is_scalar)
        variant = f"_{name}_{kinds}{n_constants or ''}_{_digest(formula, len(is_scalar), n_constants)}"
        if variant not in _kernels:
            _kernels[variant] = _lanewise(variant, formula, is_scalar, n_constants)
        _kernels[chosen] = _kernels[variant]
    return _kernels[chosen]


def _emit(b: ir.Builder, formula: Formula, operands: Sequence[ir.Value], constants: Sequence[ir.Value]) -> ir.Value:
    inputs = [Register(b, x) for x in operands]
    scalars = [Register(b, ir.splat(b, constant)) for constant in constants]
    result = formula(RegisterVocabulary(b), *inputs, *scalars)
    return Register(b, ir.constant(ir.F32X16, 0.0)).of(result)


def _digest(formula: Formula, n_operands: int, n_constants: int) -> str:
    kinds = [ir.F32X16] * n_operands + [ir.F32] * n_constants
    function = llvm.Function(llvm.Module(), llvm.FunctionType(ir.F32X16, kinds), "formula")
    b = ir.Builder(function.append_basic_block())
    b.ret(_emit(b, formula, function.args[:n_operands], function.args[n_operands:]))
    return hashlib.sha256(str(function).encode()).hexdigest()[:12]


def _lanewise(variant: str, formula: Formula, is_scalar: Sequence[bool], n_constants: int) -> Kernel:
    @intrinsic
    def apply(typingctx: Any, x0: Any, x1: Any, x2: Any, x3: Any, c0: Any, c1: Any, c2: Any, c3: Any, place: Any,
              out: Any, count: Any) -> Any:  # fmt: skip
        """Compute 16 lanes of the formula.

        They begin `place` bytes from the start of a row; lanes from `count` on are set to zero.
        """

        def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
            *numbers, place, out, count = args
            operands = [
                ir.broadcast_f32(b, x) if scalar else ir.load(b, b.add(x, place), ir.F32X16)
                for x, scalar in zip(numbers, is_scalar, strict=False)
            ]
            result = _emit(b, formula, operands, numbers[MAX_OPERANDS : MAX_OPERANDS + n_constants])
            ir.store(b, b.add(out, place), ir.first_lanes(b, result, count, ir.constant(ir.F32X16, 0.0)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, *[types.float32] * 4, *[types.int64] * 3), codegen

    def lanewise(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LANEWISE)[0], carray(simd.pointer(run), 1, RUN)[0]
        first_row, n_rows = rows_of(r, a.slots)
        n_blocks = -(-a.width // ACTIVATION_BLOCK)
        first, last = share(n_rows * n_blocks, thread, n_threads)
        row, block = first_row + first // n_blocks, first % n_blocks
        for _ in range(first, last):
            start = ACTIVATION_BLOCK * block
            x0, x1 = a.x0 + row * a.x0_stride, a.x1 + row * a.x1_stride
            x2, x3 = a.x2 + row * a.x2_stride, a.x3 + row * a.x3_stride
            out = a.out + row * a.out_stride
            for column in range(start, start + ACTIVATION_BLOCK, LANES):
                apply(x0, x1, x2, x3, a.c0, a.c1, a.c2, a.c3, 4 * column, out, a.width - column)
            block += 1
            if block == n_blocks:
                row, block = row + 1, 0

    return Kernel(lanewise, variant)

"""Multiplication by element, or by one number a head."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from llamacli.kernels.layout import RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.columns import columns
from llamacli.ops.lanewise import Lanewise, Vocabulary
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

MUL_HEADS = record("x", "factor", "factor_stride", "out", "stride", "n_heads", "head_dim")


@attrs.frozen(eq=False)
class Mul(Lanewise):
    """Multiplication op: out = a * b.

    b is as wide as a, one number a token, or a vector of the model.
    """

    verb = "mul"
    a: Value
    b: Value | Tensor

    def formula(self, v: Vocabulary, a: Any, b: Any) -> Any:
        return a * b

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield mul(g, x, x)
        yield mul(g, x, columns(g, x, 3, 1))
        yield mul(g, x, param("vector", x.width))


@attrs.frozen(eq=False)
class MulHeads(Op):
    """Multiplication op of heads: out[h] = x[h] * factor[h]."""

    x: Value
    factor: Value | Tensor
    head_dim: int

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.head_dim)
        return (heads * run[self.factor][..., None]).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        factor = f32(self.factor) if isinstance(self.factor, Value) else to.vector(self.factor)
        to.step(
            mul_heads_kernel(), MUL_HEADS, x=x, factor=factor, out=out, n_heads=x.width // self.head_dim,
            head_dim=self.head_dim, work_unit=self.head_dim,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield mul(g, x, columns(g, x, 7, 2), 24)
        yield mul(g, x, param("factors", x.width // 8), 8)


def mul(g: Recorder, a: Value, b: Value | Param, head_dim: int | None = None) -> Value:
    """Multiply a value by another, or by a vector of the model.

    Formula: `out = a * b`; with `head_dim`, `out[h] = a[h] * b[h]` for each head h
    Shapes: a [n, width]; b [n, width], [n, 1] or a parameter (width,); with `head_dim`, b [n, n_heads] or a parameter
        (n_heads,); out [n, width]
    Limits: with `head_dim`, whole heads
    Example: `out = g.mul(out, g.map(gate, sigmoid))`
    """
    other = b if isinstance(b, Value) else param_of("mul", b).weight
    shape = other.shape if isinstance(other, Tensor) else (other.width,)
    if head_dim is None:
        fits = shape == (a.width,) or (isinstance(other, Value) and shape == (1,))
        expect("mul", fits, f"width {a.width} and shape {shape}")
        return g.record(Mul(g.value(a.width), a, other))
    fits = head_dim > 0 and a.width % head_dim == 0 and shape == (a.width // head_dim,)
    expect("mul", fits, f"width {a.width}, head_dim {head_dim} and shape {shape}")
    return g.record(MulHeads(g.value(a.width), a, other, head_dim))


@functools.cache
def mul_heads_kernel() -> Kernel:
    """Compiled kernel; a head is a unit of work."""
    from llamacli.kernels.api import LANES, Kernel, carray, pointer, share, simd

    def mul_heads(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, MUL_HEADS)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        n_vector = a.head_dim // LANES * LANES
        for unit in range(first, last):
            row, head = r.first_row + unit // a.n_heads, unit % a.n_heads
            place = row * a.stride + 4 * head * a.head_dim
            factor = simd.read_f32(a.factor + row * a.factor_stride + 4 * head)
            for i in range(place, place + 4 * n_vector, 4 * LANES):
                simd.store(a.out + i, simd.mul(simd.load(a.x + i), simd.splat(factor)))
            for i in range(place + 4 * n_vector, place + 4 * a.head_dim, 4):
                simd.write_f32(a.out + i, simd.read_f32(a.x + i) * factor)

    return Kernel(mul_heads)

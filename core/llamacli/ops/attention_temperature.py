"""Attention temperature: queries grow with the logarithm of the position.

Scalable softmax (Nakanishi 2025) in the form of `attn_temperature_tuning` of Hugging Face.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import ROW, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

TEMPERATURE = record("x", "out", "stride", "width", "length", "offset", scale=np.float32)


@attrs.frozen(eq=False)
class AttentionTemperature(Op):
    """out = x * (1 + scale * ln(floor((position + offset) / length) + 1))."""

    uses_position = True

    x: Value
    scale: float
    length: int
    offset: int

    def compute(self, run: Run) -> Array:
        steps = (run.positions + self.offset) // self.length
        return run[self.x] * (1 + self.scale * np.log(steps + 1.0))[:, None]

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        to.step(
            attention_temperature_kernel(), TEMPERATURE, x=x, out=out, width=x.width, length=self.length,
            offset=self.offset, scale=self.scale, work_unit=x.width,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield attention_temperature(g, x, 0.3, 5)
        yield attention_temperature(g, x, 0.1, 4, 1)


def attention_temperature(g: Recorder, x: Value, scale: float, length: int, offset: int = 0) -> Value:
    """Multiply queries by a factor that grows with the position.

    Formula: `out = x * (1 + scale * ln(floor((position + offset) / length) + 1))`
    Shapes: x [n, width]; out [n, width]
    Limits: length > 0 (that of the original context, in tokens), offset >= 0
    Example: `q = g.attention_temperature(q, 0.1, 16384)`
    """
    expect("attention_temperature", length > 0 and offset >= 0, f"length {length} and offset {offset}")
    return g.record(AttentionTemperature(g.value(x.width), x, float(scale), length, offset))


@functools.cache
def attention_temperature_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.kernels.api import LANES, Kernel, carray, pointer, share, simd

    def attention_temperature(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, TEMPERATURE)[0], carray(pointer(run), 1, RUN)[0]
        rows = carray(pointer(r.rows), r.n_rows, ROW)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            steps = simd.splat(np.float32((rows[row].position + a.offset) // a.length + 1))
            factor = simd.fma(simd.splat(a.scale), simd.log(steps), simd.splat(np.float32(1)))
            for i in range(row * a.stride, row * a.stride + 4 * a.width, 4 * LANES):
                simd.store(a.out + i, simd.mul(simd.load(a.x + i), factor))

    return Kernel(attention_temperature)

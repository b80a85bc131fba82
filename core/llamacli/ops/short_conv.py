"""Convolution of each column over the last tokens (ssm_conv), or those around."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import LANES, STATE_FIELDS, record
from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.recurrent import Floats, StateOp
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

SHORT_CONV = record("x", "stride", "weight", "weight_stride", "bias", "out", "width", "n_taps", "n_ahead",
                    *STATE_FIELDS)  # fmt: skip
"""`weight`: float32 [n_taps, width]; `bias` may be 0."""


@attrs.frozen(eq=False)
class ShortConv(StateOp):
    """Convolution op, with weights (width, n_taps) or one number a tap.

    out[t] = sum over j of weight[:, j] * x[t - n_taps + 1 + n_ahead + j], and the bias. Tokens before the first and
    behind the last are zeros: the state holds the last n_taps - 1 rows of x.
    """

    x: Value
    weight: Tensor | tuple[float, ...]
    bias: Tensor | None
    n_ahead: int = 0

    @property
    def needs_whole_input(self) -> bool:
        return self.n_ahead > 0

    def advance(self, run: Run, first: int, last: int, state: Floats) -> tuple[Array, Floats]:
        weight = run[self.weight] if isinstance(self.weight, Tensor) else np.array([self.weight])
        n, n_taps = last - first, weight.shape[1]
        before, behind = state[self.n_ahead :, : self.x.width].astype(np.float64), np.zeros_like(state)
        x = np.concatenate([before, run[self.x][first:last], np.zeros((self.n_ahead, self.x.width))])
        out = sum(weight[:, j] * x[j : j + n] for j in range(n_taps))
        behind[:, : self.x.width] = x[n:]
        return np.asarray(out + run[self.bias] if self.bias else out), behind

    def lower(self, to: Lowering) -> None:
        x, out = f32(self.x), f32(self.out)
        if isinstance(self.weight, Tensor):
            taps = to.vector(self.weight)[: x.width, : self.weight.shape[1]].T
        else:
            taps = np.array(self.weight, np.float32)[:, None]
        n_taps = len(taps)
        weight = np.zeros((n_taps, -(-x.width // LANES) * LANES), np.float32)
        weight[:, : x.width] = taps
        to.step(
            short_conv_kernel(), SHORT_CONV, **self.state_params(to), x=x, out=out, weight=to.memory(weight),
            width=x.width, n_taps=n_taps, n_ahead=self.n_ahead, bias=to.vector(self.bias) if self.bias else None,
            work=float(n_taps * x.width),
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield short_conv(g, x, param("conv", x.width, 4, bias=True))
        yield short_conv(g, x, param("two", x.width, 2))
        yield short_conv(g, x, (1.0, -1.0))
        yield short_conv(g, x, param("around", x.width, 3), n_ahead=1)


def short_conv(g: Recorder, x: Value, weight: Param | tuple[float, ...], *, n_ahead: int = 0) -> Value:
    """Record a convolution (conv1d) with weights (width, n_taps), by default causal.

    The `n_taps` - 1 last rows of x are a recurrent state. It comes before most linear recurrences. A tuple has one
    number for each tap: with (1.0, 0.0) it is the token shift of RWKV. With `n_ahead`, which is for embedding models,
    that many taps are of tokens behind.

    Formula: `out[t, c] = bias[c] + sum(weight[c, j] * x[t - n_taps + 1 + n_ahead + j, c])` over the taps j
    Shapes: x [n, width]; weight (width, n_taps) or a tuple of n_taps numbers, bias (width,); out [n, width]
    Limits: n_taps > 1; 0 <= n_ahead < n_taps; x is 0 before the first token and behind the last
    Example: `h = g.map(g.short_conv(h, block.ssm_conv1d), silu)`
    """
    taps, bias = (weight.weight, weight.bias) if isinstance(weight, Param) else (weight, None)
    name, shape = (
        (taps.name, taps.shape)
        if isinstance(taps, Tensor)
        else (f"short_conv.{len(g.recurrent)}", (x.width, len(taps)))
    )
    expect(
        "short_conv", len(shape) == 2 and shape[0] == x.width and shape[1] > 1, f"{name} {shape} and width {x.width}"
    )
    expect("short_conv", 0 <= n_ahead < shape[1], f"{n_ahead} taps ahead of {shape[1]}")
    state = g.recurrent_state(name, shape[1] - 1, -(-x.width // LANES) * LANES)
    return g.record(ShortConv(g.value(x.width), state, x, taps, bias, n_ahead))


@functools.cache
def short_conv_kernel() -> Kernel:
    """Compiled kernel of short convolutions.

    A unit of work is 16 columns.
    """
    from llamacli.kernels.api import simd, state_kernel

    def count(a):  # type: ignore[no-untyped-def]
        return -(-a.width // LANES)

    def advance(a, block, first, last, state, target):  # type: ignore[no-untyped-def]
        at, row_bytes, n_before = 4 * LANES * block, 4 * LANES * (-(-a.width // LANES)), a.n_taps - 1
        for row in range(first, last):
            total = simd.splat(np.float32(0))
            for j in range(a.n_taps):
                source = row - n_before + a.n_ahead + j
                if source >= last:
                    x = simd.splat(np.float32(0))
                elif source >= first:
                    x = simd.load(a.x + source * a.stride + at)
                else:
                    x = simd.load(state + (source - first + n_before) * row_bytes + at)
                total = simd.fma(x, simd.load(a.weight + j * a.weight_stride + at), total)
            if a.bias:
                total = simd.add(total, simd.load(a.bias + at))
            simd.store(a.out + row * a.stride + at, total)
        for i in range(n_before):
            source = last - n_before + i
            if source >= first:
                x = simd.load(a.x + source * a.stride + at)
            else:
                x = simd.load(state + (source - first + n_before) * row_bytes + at)
            simd.store(target + i * row_bytes + at, x)

    return state_kernel("short_conv", SHORT_CONV, count, advance)

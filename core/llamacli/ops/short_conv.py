"""Causal convolution of each column over the last tokens (ssm_conv)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import LANES, RECURRENT_ENTRY, RUN, SOURCE, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lowering import Lowering, f32, stride
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

SHORT_CONV = record("x", "stride", "weight", "weight_stride", "bias", "out", "entry", "width", "n_taps")
"""`weight`: float32 [n_taps, width]; `bias` may be 0; `entry`: bytes of the state's entry in KVSequence.addresses."""


@attrs.frozen(eq=False)
class ShortConv(Op):
    """Causal convolution op, with weights (width, n_taps) or one number a tap.

    out[t] = sum over j of weight[:, j] * x[t - n_taps + 1 + j], and the bias. Tokens before the first are zeros.
    """

    mixes_tokens = True

    x: Value
    weight: Tensor | tuple[float, ...]
    bias: Tensor | None
    state: int

    def compute(self, run: Run) -> Array:
        """See Op."""
        width = self.x.width
        weight = run[self.weight] if isinstance(self.weight, Tensor) else np.array([self.weight])
        n_before = weight.shape[1] - 1
        state = run.sequence.read_state(self.state, SOURCE)
        x = np.concatenate([state[:, :width].astype(np.float64), run[self.x]])
        out = sum(weight[:, j] * x[j : j + run.n] for j in range(n_before + 1))
        last, kept, n_kept = np.zeros_like(state), np.zeros_like(state), run.n - run.sequence.n_behind
        last[:, :width], kept[:, :width] = x[run.n :], x[n_kept : n_kept + n_before]
        run.sequence.write_state(self.state, last, kept)
        return np.asarray(out + run[self.bias] if self.bias else out)

    def lower(self, to: Lowering) -> None:
        """See Op."""
        x, out = f32(self.x), f32(self.out)
        if isinstance(self.weight, Tensor):
            taps = to.vector(self.weight)[: x.width, : self.weight.shape[1]].T
        else:
            taps = np.array(self.weight, np.float32)[:, None]
        n_taps = len(taps)
        weight = np.zeros((n_taps, -(-x.width // LANES) * LANES), np.float32)
        weight[:, : x.width] = taps
        params = {
            "weight": to.memory(weight), "weight_stride": stride(weight), "width": x.width, "n_taps": n_taps,
            "bias": to.vector(self.bias) if self.bias else 0, "entry": RECURRENT_ENTRY * (len(to.states) + self.state),
        }  # fmt: skip
        to.step(
            short_conv_kernel(),
            SHORT_CONV,
            [x],
            [out],
            lambda at: {"x": at(x), "out": at(out), "stride": stride(at(x)), **params},
            work=float(n_taps * x.width),
        )

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        yield short_conv(g, x, param("conv", x.width, 4, bias=True))
        yield short_conv(g, x, param("two", x.width, 2))
        yield short_conv(g, x, (1.0, -1.0))


def short_conv(g: Recorder, x: Value, weight: Param | tuple[float, ...]) -> Value:
    """Record a causal convolution (conv1d) with weights (width, n_taps).

    The `n_taps` - 1 last rows of x are a recurrent state. It comes before most linear recurrences. A tuple has one
    number for each tap: with (1.0, 0.0) it is the token shift of RWKV.

    Formula: `out[t, c] = bias[c] + sum(weight[c, j] * x[t - n_taps + 1 + j, c])` over the taps j
    Shapes: x [n, width]; weight (width, n_taps) or a tuple of n_taps numbers, bias (width,); out [n, width]
    Limits: n_taps > 1; x is 0 before the first token
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
    state = g.recurrent_state(name, shape[1] - 1, -(-x.width // LANES) * LANES)
    return g.record(ShortConv(g.value(x.width), x, taps, bias, state))


@functools.cache
def short_conv_kernel() -> Kernel:
    """Compiled kernel of short convolutions.

    A unit of work is 16 columns of all rows.
    """
    from llamacli.kernels.api import Kernel, carray, njit, pointer, share, simd
    from llamacli.kernels.recurrent import kept_page, last_row, rows_behind, source_page, target_page

    @njit(inline="always")
    def copy_state(a, first, n, source, page, at):  # type: ignore[no-untyped-def]
        """Write the last inputs after `n` rows to a page."""
        row_bytes = 4 * (-(-a.width // LANES) * LANES)
        for i in range(a.n_taps - 1):
            t = n - (a.n_taps - 1) + i
            if t >= 0:
                x = simd.load(a.x + (first + t) * a.stride + at)
            elif source:
                x = simd.load(source + (n + i) * row_bytes + at)
            else:
                x = simd.splat(np.float32(0))
            simd.store(page + i * row_bytes + at, x)

    def short_conv(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, SHORT_CONV)[0], carray(pointer(run), 1, RUN)[0]
        n_blocks = -(-a.width // LANES)
        row_bytes = 4 * LANES * n_blocks
        first_block, last_block = share(n_blocks, thread, n_threads)
        for block in range(first_block, last_block):
            at = 4 * LANES * block
            first = r.first_row
            while first < r.n_rows:
                last = last_row(r.rows, first, r.n_rows)
                source = source_page(r.rows, first, a.entry)
                for row in range(first, last):
                    total = simd.splat(np.float32(0))
                    for j in range(a.n_taps):
                        t = row - first - (a.n_taps - 1) + j
                        if t >= 0:
                            x = simd.load(a.x + (first + t) * a.stride + at)
                        elif source:
                            x = simd.load(source + (row - first + j) * row_bytes + at)
                        else:
                            x = simd.splat(np.float32(0))
                        total = simd.fma(x, simd.load(a.weight + j * a.weight_stride + at), total)
                    if a.bias:
                        total = simd.add(total, simd.load(a.bias + at))
                    simd.store(a.out + row * a.stride + at, total)
                copy_state(a, first, last - first, source, target_page(r.rows, first, a.entry), at)
                n_behind = rows_behind(r.rows, first, a.entry)
                if n_behind:
                    kept = kept_page(r.rows, first, a.entry)
                    copy_state(a, first, last - first - n_behind, source, kept, at)
                first = last

    return Kernel(short_conv)

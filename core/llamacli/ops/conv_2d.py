"""Convolution over the time and the frequencies of sound (conv_2d)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from llamacli.kernels.layout import LANES, ROW, RUN, record
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.lowering import Array as Buffer
from llamacli.ops.lowering import HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

CONV_2D = record(
    "x", "x_stride", "weight", "bias", "zeros", "out", "out_stride", "n_in", "n_out", "times", "freqs", "out_times",
    "out_freqs", "time_taps", "freq_taps", "time_stride", "freq_stride", "n_times",
)  # fmt: skip
"""`weight`: float32 [n_out / LANES, time_taps, freq_taps, n_in, LANES]."""


@attrs.frozen(eq=False)
class Conv2d(Op):
    """Convolution op of the rows of a sequence, in time.

    A row is (times, freqs, n_in); the weight is (n_out, n_in * freq_taps * time_taps). Outside of the sequence, which
    has `n_times` times, and of the frequencies x is 0.
    """

    mixes_tokens = True
    uses_position = True

    x: Value
    weight: Tensor
    bias: Tensor | None
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    n_times: int
    channels_first: bool

    @property
    def needs_whole_input(self) -> bool:
        return True

    @property
    def n_in(self) -> int:
        """Numbers of a time and frequency of x."""
        return self.x.width // (self.size[0] * self.size[1])

    @property
    def out_size(self) -> tuple[int, int]:
        """Times and frequencies of a row of the result."""
        return self.size[0] // self.stride[0], (self.size[1] - 1) // self.stride[1] + 1

    def compute(self, run: Run) -> Array:
        x, (times, freqs) = run[self.x].reshape(run.n, *self.size, self.n_in), self.size
        (out_times, out_freqs), (reach, width), weight = self.out_size, self.kernel, self._taps(run[self.weight])
        out = np.zeros((run.n, out_times, out_freqs, self.weight.shape[0]))
        place = run.positions[:, None] * out_times + np.arange(out_times)
        first = np.arange(run.n)[:, None] - run.positions[:, None]
        for i in range(reach):
            time = place * self.stride[0] + i - reach // 2
            row = np.clip(first + time // times, 0, run.n - 1)
            is_inside = (time >= 0) & (time < self.n_times) & (first + time // times < run.n)
            seen = np.where(is_inside[..., None, None], x[row, time % times], 0)
            padded = np.pad(seen, ((0, 0), (0, 0), (width // 2, width // 2), (0, 0)))
            for k in range(width):
                taken = padded[:, :, k : k + freqs : self.stride[1]][:, :, :out_freqs]
                out += taken @ weight[i, k]
        out = out + run[self.bias] if self.bias else out
        return (out.swapaxes(2, 3) if self.channels_first else out).reshape(run.n, -1)

    def _taps(self, weight: Array) -> Array:
        """Weight by time tap, frequency tap, n_in and n_out."""
        time_taps, freq_taps = self.kernel
        return weight.reshape(-1, self.n_in, freq_taps, time_taps).transpose(3, 2, 1, 0)

    def lower(self, to: Lowering) -> None:
        n_out, n_columns = self.weight.shape
        taps = self._taps(to.vector(self.weight)[:n_out, :n_columns])
        n_blocks = -(-n_out // LANES)
        weight = np.zeros((*taps.shape[:3], n_blocks * LANES), np.float32)
        weight[..., :n_out] = taps
        blocks = weight.reshape(*taps.shape[:3], n_blocks, LANES).transpose(3, 0, 1, 2, 4)
        out = f32(self.out)
        target = Slot((self, "channels last"), "f32", out.width) if self.channels_first else out
        to.step(
            conv_2d_kernel(), CONV_2D, x=f32(self.x), out=target, weight=to.memory(np.ascontiguousarray(blocks)),
            bias=to.vector(self.bias) if self.bias else to.zeros, zeros=to.zeros, n_in=self.n_in, n_out=n_out,
            times=self.size[0], freqs=self.size[1], out_times=self.out_size[0], out_freqs=self.out_size[1],
            time_taps=self.kernel[0], freq_taps=self.kernel[1], time_stride=self.stride[0], freq_stride=self.stride[1],
            n_times=self.n_times, work=float(self.out.width * n_columns),
        )  # fmt: skip
        if self.channels_first:

            def turn(rows: HostRows, at: Callable[[Slot], Buffer]) -> None:
                turned = at(target)[rows.first : rows.stop, : out.width].reshape(-1, *self.out_size, n_out)
                at(out)[rows.first : rows.stop, : out.width] = turned.swapaxes(2, 3).reshape(-1, out.width)

            to.host_step(turn, [target], [out])

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield conv_2d(g, x, param("conv1d", 32, 3 * x.width // 2, bias=True), (2, 1), 99, kernel=(3, 1))
        weight = param("conv2d", 16, 9 * x.width // 16)
        yield conv_2d(g, x, weight, (4, 4), 99, stride=(2, 2), channels_first=True)


def conv_2d(
    g: Recorder,
    x: Value,
    param: Param,
    size: tuple[int, int],
    n_times: int,
    *,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    channels_first: bool = False,
) -> Value:
    """Record a convolution over time and frequencies (conv1d, conv2d).

    A row has `size` = (times, freqs) times and frequencies of n_in numbers each. The rows of a sequence, which begins
    at position 0, follow each other in time; it has `n_times` times, and its last row may have more. `kernel` are the
    taps, odd numbers, and `stride` the steps, both of time and frequency; x is 0 outside of the sequence. Frequencies
    that are one row of n_in numbers, of a size (times, 1), are the channels of a conv1d. With `channels_first` a time
    of the result is (n_out, freqs_out), as a matrix after a conv2d reads it.

    Formula: `out[t, f] = bias + sum(weight[:, :, k, j] @ x[t * st + j - kt // 2, f * sf + k - kf // 2])` over all taps
    Shapes: x [n, times * freqs * n_in], weight (n_out, n_in * kf * kt), bias (n_out,); out [n, times / st * freqs_out *
        n_out] with freqs_out = (freqs - 1) // sf + 1
    Limits: media encoders only; times a multiple of the stride; n_out a multiple of 16; weights are never rounded
    Example: `x = g.map(g.conv_2d(x, weights.a_conv1d_2, (2, 1), 3000, kernel=(3, 1), stride=(2, 1)), gelu_erf)`
    """
    weight = param_of("conv_2d", param).weight
    n_in = x.width // max(1, size[0] * size[1])
    shape = (weight.shape[0], n_in * kernel[0] * kernel[1])
    fits = min(*size, n_times) > 0 and x.width == n_in * size[0] * size[1] and weight.shape == shape
    expect("conv_2d", fits, f"{weight.name} {weight.shape}, taps {kernel}, and width {x.width} of {size}")
    expect("conv_2d", all(n % 2 for n in kernel) and size[0] % stride[0] == 0, f"taps {kernel} and strides {stride}")
    expect("conv_2d", weight.shape[0] % LANES == 0, f"{weight.name} {weight.shape} and rows of a multiple of {LANES}")
    bias = param.bias
    expect("conv_2d", bias is None or bias.shape == (weight.shape[0],), f"{weight.name} {weight.shape} and its bias")
    out_freqs = (size[1] - 1) // stride[1] + 1
    out = g.value(size[0] // stride[0] * out_freqs * weight.shape[0])
    return g.record(Conv2d(out, x, weight, bias, size, kernel, stride, n_times, channels_first))


@functools.cache
def conv_2d_kernel() -> Kernel:
    """Compiled kernel.

    A unit of work are 16 numbers of each of 6 places, a time and frequency of a row.
    """
    from llamacli.kernels.api import Kernel, carray, njit, pointer, share, simd

    @njit
    def source(a, r, rows, place, i, k):  # type: ignore[no-untyped-def]
        """Address of the numbers of x at a tap."""
        n_places = a.out_times * a.out_freqs
        row, inside = min(place // n_places, r.n_rows - 1), place % n_places
        position = rows[row].position
        time = (position * a.out_times + inside // a.out_freqs) * a.time_stride + i - a.time_taps // 2
        freq = inside % a.out_freqs * a.freq_stride + k - a.freq_taps // 2
        if time < 0 or time >= a.n_times or freq < 0 or freq >= a.freqs:
            return a.zeros
        seen = row - position + time // a.times
        if seen - row >= rows[row].end - rows[row].cell:
            return a.zeros
        return a.x + seen * a.x_stride + 4 * a.n_in * (time % a.times * a.freqs + freq)

    @njit
    def put(a, place, stop, block, sums):  # type: ignore[no-untyped-def]
        n_places = a.out_times * a.out_freqs
        if place < stop:
            at = 4 * (a.n_out * (place % n_places) + LANES * block)
            simd.store(a.out + place // n_places * a.out_stride + at, sums)

    def conv_2d(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, CONV_2D)[0], carray(pointer(run), 1, RUN)[0]
        rows = carray(pointer(r.rows), r.n_rows, ROW)
        n_places = a.out_times * a.out_freqs
        start, stop = r.first_row * n_places, r.n_rows * n_places
        n_groups = -(-(stop - start) // 6)
        first, last = share(n_groups * (a.n_out // LANES), thread, n_threads)
        for unit in range(first, last):
            block, place = unit // n_groups, start + unit % n_groups * 6
            s0 = simd.load(a.bias + 4 * LANES * block)
            s1, s2, s3, s4, s5 = s0, s0, s0, s0, s0
            weight = a.weight + 4 * LANES * block * a.time_taps * a.freq_taps * a.n_in
            for i in range(a.time_taps):
                for k in range(a.freq_taps):
                    x0, x1 = source(a, r, rows, place, i, k), source(a, r, rows, place + 1, i, k)
                    x2, x3 = source(a, r, rows, place + 2, i, k), source(a, r, rows, place + 3, i, k)
                    x4, x5 = source(a, r, rows, place + 4, i, k), source(a, r, rows, place + 5, i, k)
                    for at in range(0, 4 * a.n_in, 4):
                        w = simd.load(weight)
                        s0 = simd.fma(simd.splat(simd.read_f32(x0 + at)), w, s0)
                        s1 = simd.fma(simd.splat(simd.read_f32(x1 + at)), w, s1)
                        s2 = simd.fma(simd.splat(simd.read_f32(x2 + at)), w, s2)
                        s3 = simd.fma(simd.splat(simd.read_f32(x3 + at)), w, s3)
                        s4 = simd.fma(simd.splat(simd.read_f32(x4 + at)), w, s4)
                        s5 = simd.fma(simd.splat(simd.read_f32(x5 + at)), w, s5)
                        weight += 4 * LANES
            put(a, place, stop, block, s0)
            put(a, place + 1, stop, block, s1)
            put(a, place + 2, stop, block, s2)
            put(a, place + 3, stop, block, s3)
            put(a, place + 4, stop, block, s4)
            put(a, place + 5, stop, block, s5)

    return Kernel(conv_2d)

"""Alternating updates (AltUp, Baykal et al. 2023, arXiv:2301.13310).

The residual stream is several values as wide as the model. A layer computes the first one only; before it, all are
predicted from one another, behind it corrected by how far the prediction was off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from llamacli.plugin import (
    ACTIVATION_BLOCK,
    RUN,
    Array,
    Lanewise,
    Lowering,
    MakeParam,
    Op,
    Recorder,
    Run,
    Value,
    Vocabulary,
    columns,
    expect,
    f32,
    record,
)

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

PREDICT = record("streams", "n_streams", "own", "stride", "coefs", "coefs_stride", "out", "width")
"""`streams` is the address of the streams' addresses, `coefs` that of the first factor; `own` is the number of the
stream that is predicted."""

MATCH = record("x", "like", "out", "stride", "width")


@attrs.frozen(eq=False)
class PredictStream(Op):
    """Prediction of a stream from all n of them.

    out = s[own] + sum over k of coefs[own * n + k] * s[k].
    """

    streams: tuple[Value, ...]
    coefs: Value
    own: int

    def compute(self, run: Run) -> Array:
        n = len(self.streams)
        coefs = run[self.coefs][:, self.own * n : (self.own + 1) * n]
        mixed = sum(coefs[:, k : k + 1] * run[stream] for k, stream in enumerate(self.streams))
        return run[self.streams[self.own]] + mixed

    def lower(self, to: Lowering) -> None:
        streams, coefs, out = [f32(stream) for stream in self.streams], f32(self.coefs), f32(self.out)
        to.step(
            predict_kernel(), PREDICT, streams=streams, n_streams=len(streams), own=self.own,
            coefs=coefs.columns(self.own * len(streams)), out=out, width=out.width,
            work_unit=ACTIVATION_BLOCK,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        streams = x, x + x, x
        yield predict(g, streams, columns(g, x, 5, 9))[1]
        narrow = columns(g, x, 2, 21), columns(g, x, 9, 21)
        yield predict(g, narrow, columns(g, x, 0, 4))[0]


@attrs.frozen(eq=False)
class CorrectStream(Lanewise):
    """out = predicted + (coef + 1) * (computed - active), coef one number a token."""

    verb = "correct_stream"
    predicted: Value
    coef: Value
    computed: Value
    active: Value

    def formula(self, v: Vocabulary, predicted: Any, coef: Any, computed: Any, active: Any) -> Any:
        return v.fma(coef + 1.0, computed - active, predicted)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield correct(g, (x, x + x), columns(g, x, 4, 2), x + x)[1]


@attrs.frozen(eq=False)
class MatchMagnitude(Op):
    """out = x * |like| / |x|, magnitudes of each token's row."""

    x: Value
    like: Value

    def compute(self, run: Run) -> Array:
        x, like = run[self.x], run[self.like]
        return x * (np.linalg.norm(like, axis=1, keepdims=True) / np.linalg.norm(x, axis=1, keepdims=True))

    def lower(self, to: Lowering) -> None:
        x, like, out = f32(self.x), f32(self.like), f32(self.out)
        to.step(match_kernel(), MATCH, x=x, like=like, out=out, width=x.width, work_unit=x.width)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield match_magnitude(g, x, x + x)
        yield match_magnitude(g, columns(g, x, 3, 21), columns(g, x, 20, 21))


def predict(g: Recorder, streams: tuple[Value, ...], coefs: Value) -> tuple[Value, ...]:
    """Predict each of n streams from all of them.

    coefs has n * n numbers a token.
    """
    width, n = streams[0].width, len(streams)
    expect("predict", all(stream.width == width for stream in streams), "streams of different widths")
    expect("predict", coefs.width == n * n, f"coefficients of width {coefs.width} and {n} streams")
    return tuple(g.record(PredictStream(g.value(width), streams, coefs, own)) for own in range(n))


def correct(g: Recorder, predicted: tuple[Value, ...], coefs: Value, computed: Value) -> tuple[Value, ...]:
    """Correct n predicted streams by what was computed of the first.

    coefs has n numbers a token.
    """
    expect("correct", coefs.width == len(predicted), f"width {coefs.width} and {len(predicted)} streams")
    return tuple(
        g.record(CorrectStream(g.value(x.width), x, columns(g, coefs, i, 1), computed, predicted[0]))
        for i, x in enumerate(predicted)
    )


def match_magnitude(g: Recorder, x: Value, like: Value) -> Value:
    """Scale rows of x to the magnitudes of those of `like`.

    Magnitudes are sqrt(sum(x^2)).
    """
    expect("match_magnitude", x.width == like.width, f"widths {x.width} and {like.width}")
    return g.record(MatchMagnitude(g.value(x.width), x, like))


@functools.cache
def predict_kernel() -> Kernel:
    """Compiled kernel of predictions.

    32 columns of a row are a unit of work.
    """
    from llamacli.plugin import LANES, Kernel, carray, pointer, share, simd

    def predict_stream(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, PREDICT)[0], carray(pointer(run), 1, RUN)[0]
        streams = carray(pointer(a.streams), a.n_streams, np.int64)
        n_blocks = -(-a.width // ACTIVATION_BLOCK)
        first, last = share((r.n_rows - r.first_row) * n_blocks, thread, n_threads)
        for unit in range(first, last):
            row = r.first_row + unit // n_blocks
            coefs = a.coefs + row * a.coefs_stride
            start = row * a.stride + 4 * ACTIVATION_BLOCK * (unit % n_blocks)
            for at in range(start, start + 4 * ACTIVATION_BLOCK, 4 * LANES):
                total = simd.load(streams[a.own] + at)
                for k in range(a.n_streams):
                    total = simd.fma(simd.splat(simd.read_f32(coefs + 4 * k)), simd.load(streams[k] + at), total)
                simd.store(a.out + at, total)

    return Kernel(predict_stream)


@functools.cache
def match_kernel() -> Kernel:
    """Compiled kernel of equal magnitudes.

    Sums are float64; a row is a unit of work.
    """
    from llamacli.plugin import LANES, Kernel, carray, pointer, share, simd

    def match_magnitude(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, MATCH)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.stride), a.width, np.float32)
            like = carray(pointer(a.like + row * a.stride), a.width, np.float32)
            sum_x = sum_like = 0.0
            for i in range(a.width):
                sum_x += np.float64(x[i]) * np.float64(x[i])
                sum_like += np.float64(like[i]) * np.float64(like[i])
            scale = simd.splat(np.float32(np.sqrt(sum_like / sum_x)))
            for at in range(row * a.stride, row * a.stride + 4 * a.width, 4 * LANES):
                simd.store(a.out + at, simd.mul(simd.load(a.x + at), scale))

    return Kernel(match_magnitude)

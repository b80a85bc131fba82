"""Sums over a head, and its shift, scale and weight, for normalisation."""

from __future__ import annotations

from typing import Any

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import njit, types
from llamacli.kernels.layout import LANES


@ir.expose(types.float64, types.int64, types.int64)
def sum_of(b: ir.Builder, x: ir.Value, n: ir.Value) -> ir.Value:
    """Sum of n float32 at an address, in float64."""
    return ir.sum_f64(b, x, n, lambda some: some)


@ir.expose(types.float64, types.int64, types.int64, types.float32)
def sum_of_squares(b: ir.Builder, x: ir.Value, n: ir.Value, mean: ir.Value) -> ir.Value:
    """Sum of squares of n float32 less a mean.

    Squares are float32, their sum is float64.
    """

    def square(some: ir.Value) -> ir.Value:
        rest = b.fsub(some, mean if some.type == ir.F32 else ir.splat(b, mean))
        return b.fmul(rest, rest)

    return ir.sum_f64(b, x, n, square)


@njit(inline="always")
def write_normed(x: Any, out: Any, n: Any, whole: Any, mean: Any, scale: Any, weight: Any, bias: Any) -> None:
    """out = (x - mean) * scale * weight + bias, over n numbers.

    `x`, `out`, `weight` and `bias` are addresses; `bias` may be 0. Only the last head of a row may be written beyond
    its end, where there is padding: `whole` says that this is one.
    """
    n_vector = n if whole else n // LANES * LANES
    for i in range(0, 4 * n_vector, 4 * LANES):
        normed = simd.mul(simd.sub(simd.load(x + i), simd.splat(mean)), simd.splat(scale))
        normed = simd.mul(normed, simd.load(weight + i))
        if bias:
            normed = simd.add(normed, simd.load(bias + i))
        simd.store(out + i, normed)
    for i in range(4 * n_vector, 4 * n, 4):
        normed_one = (simd.read_f32(x + i) - mean) * scale * simd.read_f32(weight + i)
        if bias:
            normed_one += simd.read_f32(bias + i)
        simd.write_f32(out + i, normed_one)

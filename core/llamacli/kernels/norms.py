"""Last part of normalisation kernels: shift, scale and weight a head."""

from __future__ import annotations

from typing import Any

from llamacli.kernels import simd
from llamacli.kernels.deferred import njit
from llamacli.kernels.layout import LANES


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

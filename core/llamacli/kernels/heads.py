"""Copy of float32 numbers between heads of rows."""

from __future__ import annotations

from typing import Any

from llamacli.kernels import simd
from llamacli.kernels.deferred import njit
from llamacli.kernels.layout import LANES


@njit(inline="always")
def copy_f32(x: Any, out: Any, n: Any) -> None:
    """Copy n float32 numbers from x to out, touching none beyond."""
    n_vector = n // LANES * LANES
    for i in range(0, 4 * n_vector, 4 * LANES):
        simd.store(out + i, simd.load(x + i))
    for i in range(4 * n_vector, 4 * n, 4):
        simd.write_f32(out + i, simd.read_f32(x + i))

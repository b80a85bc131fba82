"""Scaling of low-rank products: LoRA adapters, whose scales differ by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import kernel
from llamacli.kernels.layout import ROW, RUN, record
from llamacli.kernels.work import rows_of, share

SCALE_ADAPTER = record("x", "x_stride", "out", "out_stride", "width", "adapter", "slots", "rows", ratio=np.float64)
"""out = x * ratio * scale, where `scale` is number `adapter` of the row's `adapter_scales`, 1 without them. Rows have
`slots` each if it is not 0, and `rows`, int64 [n_slots], is the row of each slot."""


@njit(inline="always")
def _scale_of(token: Any, adapter: Any) -> Any:
    if token.adapter_scales == 0:
        return 1.0
    return carray(simd.pointer(token.adapter_scales), adapter + 1, np.float64)[adapter]


@kernel
def scale_adapter(args: int, run: int, thread: int, n_threads: int) -> None:
    """Multiply rows by the scale of an adapter.

    Zeros where it is 0, whatever x is. A row is a unit of work.
    """
    a, r = carray(simd.pointer(args), 1, SCALE_ADAPTER)[0], carray(simd.pointer(run), 1, RUN)[0]
    first_row, n_rows = rows_of(r, a.slots)
    first, last = share(n_rows, thread, n_threads)
    tokens = carray(simd.pointer(r.rows), r.n_rows, ROW)
    for row in range(first_row + first, first_row + last):
        token = tokens[simd.read_i64(a.rows + 8 * row) if a.slots else row]
        scale = _scale_of(token, a.adapter)
        factor, x, out = simd.splat(np.float32(a.ratio * scale)), a.x + row * a.x_stride, a.out + row * a.out_stride
        for at in range(0, 4 * a.width, 4 * ir.LANES):
            simd.store(out + at, simd.mul(simd.load(x + at), factor) if scale else simd.splat(np.float32(0)))

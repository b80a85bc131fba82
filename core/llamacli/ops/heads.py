"""Copies of heads: the kernel step of `columns`, `concat` and `repeat`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs

from llamacli.kernels.layout import RUN, record
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.values import Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

COPY_HEADS = record(
    "x", "x_stride", "x_head", "x_each", "x_heads", "x_width", "y", "y_stride", "y_head", "y_each", "y_heads",
    "y_width", "out", "out_stride", "n_heads",
)  # fmt: skip
"""Two sources, of which the second may be empty: address, bytes between rows and between heads, numbers of each head.
Head h of the result reads head `h // each % heads` of a source."""


@attrs.frozen
class Heads:
    """Source of copied heads.

    `width` numbers, from `first` on, of each head of `head_dim` numbers of x. `each` consecutive heads of the result
    read the same head; after the last head the first follows again.
    """

    x: Value
    head_dim: int
    first: int
    width: int
    each: int = 1

    def fields(self, prefix: str) -> dict[str, Any]:
        """Fields of COPY_HEADS that begin with `prefix`."""
        return {
            prefix: f32(self.x).columns(self.first), f"{prefix}_head": 4 * self.head_dim,
            f"{prefix}_each": self.each, f"{prefix}_heads": self.x.width // self.head_dim,
            f"{prefix}_width": self.width,
        }  # fmt: skip


def lower_heads(to: Lowering, n_heads: int, out: Value, x: Heads, y: Heads | None = None) -> None:
    """Append the kernel step that copies heads.

    Each of the `n_heads` heads of `out` is a head of x, then one of y. A head is a unit of work.
    """
    second = y or attrs.evolve(x, width=0)
    to.step(
        copy_heads_kernel(), COPY_HEADS, **x.fields("x"), **second.fields("y"), out=f32(out), n_heads=n_heads,
        work_unit=x.width + second.width,
    )  # fmt: skip


@functools.cache
def copy_heads_kernel() -> Kernel:
    """Compiled kernel that copies heads."""
    from llamacli.kernels.api import Kernel, carray, pointer, share
    from llamacli.kernels.heads import copy_f32

    def copy_heads(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, COPY_HEADS)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_heads, thread, n_threads)
        for unit in range(first, last):
            row, head = r.first_row + unit // a.n_heads, unit % a.n_heads
            out = a.out + row * a.out_stride + 4 * head * (a.x_width + a.y_width)
            copy_f32(a.x + row * a.x_stride + head // a.x_each % a.x_heads * a.x_head, out, a.x_width)
            y = a.y + row * a.y_stride + head // a.y_each % a.y_heads * a.y_head
            copy_f32(y, out + 4 * a.x_width, a.y_width)

    return Kernel(copy_heads)

"""Repetition of heads, as grouped queries and linear attention need."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.heads import Heads, lower_heads
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value


@attrs.frozen(eq=False)
class Repeat(Op):
    """Repetition op: each head of `head_dim` numbers `times` times.

    All heads one after the other if `tiled` (a b a b), else each beside itself (a a b b).
    """

    x: Value
    head_dim: int
    times: int
    tiled: bool

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.head_dim)
        repeated = np.tile(heads, (1, self.times, 1)) if self.tiled else np.repeat(heads, self.times, 1)
        return repeated.reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        each = 1 if self.tiled else self.times
        lower_heads(to, self.out.width // self.head_dim, self.out, Heads(self.x, self.head_dim, 0, self.head_dim, each))

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield repeat(g, x, 12, 3, tiled=True)
        yield repeat(g, x, 16, 2, tiled=False)


def repeat(g: Recorder, x: Value, head_dim: int, times: int, *, tiled: bool) -> Value:
    """Repeat each head of x.

    As `torch.repeat_interleave`, or as `torch.tile` if `tiled`.

    Formula: `out[h] = x[h // times]`, or `x[h % n_heads]` if `tiled`
    Shapes: x [n, n_heads * head_dim]; out [n, times * n_heads * head_dim]
    Limits: whole heads, at least one time
    Example: `q = g.repeat(q, 128, n_value_heads // n_key_heads, tiled=True)`
    """
    fits = head_dim > 0 and x.width % head_dim == 0
    expect("repeat", fits, f"head_dim {head_dim} and width {x.width}")
    expect("repeat", times > 0, f"{times} times and at least one")
    return g.record(Repeat(g.value(times * x.width), x, head_dim, times, tiled))

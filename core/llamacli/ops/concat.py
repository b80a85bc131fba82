"""Concatenation of heads: each head of a, then that of b."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.columns import columns
from llamacli.ops.heads import Heads, lower_heads
from llamacli.ops.key_shift import Keys, KeyShift
from llamacli.ops.lowering import Lowering
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value


@attrs.frozen(eq=False)
class Concat(Op):
    """Concatenation op: heads of a and of b, side by side.

    They have `of[0]` and `of[1]` numbers. Where one of the two has a single head, all heads of the other get it.
    """

    a: Value
    b: Value
    of: tuple[int, int]

    @property
    def n_heads(self) -> int:
        """Number of heads of the result."""
        return self.out.width // sum(self.of)

    def compute(self, run: Run) -> Array:
        parts = [run[x].reshape(run.n, -1, dim) for x, dim in zip((self.a, self.b), self.of, strict=True)]
        parts = [np.broadcast_to(part, (run.n, self.n_heads, part.shape[-1])) for part in parts]
        return np.concatenate(parts, -1).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        a, b = (Heads(x, dim, 0, dim) for x, dim in zip((self.a, self.b), self.of, strict=True))
        lower_heads(to, self.n_heads, self.out, a, b)

    def shift_keys(self, keys: Keys, shift: KeyShift) -> Keys | None:
        # Each part is shifted by itself: shifts of a part keep its length, and so that of the whole head.
        if keys.shape[1] != sum(self.of):
            return None
        a, b = np.split(keys, [self.of[0]], 1)
        shifted_a, shifted_b = shift.of(self.a, a, shift.is_normed), shift.of(self.b, b, shift.is_normed)
        return None if shifted_a is None or shifted_b is None else np.concatenate([shifted_a, shifted_b], 1)

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield concat(g, x, columns(g, x, 3, 27), of=(16, 9))
        yield concat(g, x, columns(g, x, 30, 18), of=(8, 18))
        yield concat(g, columns(g, x, 0, 5), x, of=(5, 24))
        yield concat(g, x, x, of=(x.width, x.width))


def concat(g: Recorder, a: Value, b: Value, of: tuple[int, int] | None = None) -> Value:
    """Concatenate a and b, head by head.

    Without `of`, they are one head each.

    Formula: `out[h] = [a[h], b[h]]` for each head h
    Shapes: a [n, h * da], b [n, h * db] with `of=(da, db)`; out [n, h * (da + db)]
    Limits: equal numbers of heads; or one of the two has a single head, which all heads of the other get
    Example: `k = g.concat(k_nope, g.rope(k_rope, rope, 64), of=(128, 64))`
    """
    da, db = of or (a.width, b.width)
    fits = da > 0 and db > 0 and a.width % da == 0 and b.width % db == 0
    expect("concat", fits, f"heads of {da} and {db} numbers and widths {a.width} and {b.width}")
    n_a, n_b = a.width // da, b.width // db
    expect("concat", n_a == n_b or 1 in (n_a, n_b), f"{n_a} and {n_b} heads")
    return g.record(Concat(g.value(max(n_a, n_b) * (da + db)), a, b, (da, db)))

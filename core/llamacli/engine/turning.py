"""Turning cached keys to other positions, by the RoPE that the graph turned them with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.errors import InvalidRequestError

Array = npt.NDArray[np.float32]


class Turns:
    """How the keys of each state depend on positions. `load` gives a tensor of RoPE factors, perhaps padded."""

    def __init__(self, graph: g.Graph, load: Callable[[g.Tensor], Array]):
        made = {op.out: op for op in graph.ops}
        stores = sorted((op for op in graph.ops if isinstance(op, g.Store)), key=lambda op: op.layer)
        self._makers = [made[op.k] for op in stores]
        rotations = [op for op in graph.ops if isinstance(op, g.Rotate)]
        self._lengths = sorted({op.rope.n_ctx_orig for op in rotations if op.long_factors})
        self._factors = {
            factors: load(factors)[: op.rope.n_dims // 2].copy()
            for op in rotations
            for factors in (op.factors, op.long_factors)
            if factors
        }

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return sum(seq_len > length for length in self._lengths)

    def shift_keys(self, layer: int, keys: Array, by: int, seq_len: int) -> Array:
        """See `llamacli.engine.base.Program.shift_keys`. The magnitude that RoPE gave keys stays as it is."""
        maker = self._makers[layer]
        if isinstance(maker, (g.Linear, g.RmsNorm, g.Columns)):  # never turned
            return keys
        if not isinstance(maker, g.Rotate):
            raise InvalidRequestError(
                "this model's keys cannot be moved to other positions: RoPE is not their last step"
            )
        rope = maker.rope
        tensor = maker.long_factors if maker.long_factors and seq_len > rope.n_ctx_orig else maker.factors
        cos, sin = rope.table(by, 1, self._factors[tensor] if tensor else None)
        magnitude = rope.table(0, 1)[0][0, 0]
        cos, sin = cos[0, :, None] / magnitude, -sin[0, :, None] / magnitude
        turned = keys.copy()
        half = rope.n_dims // 2
        pairs = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(half), slice(half, 2 * half))
        )
        first, second = keys[:, pairs[0]], keys[:, pairs[1]]
        turned[:, pairs[0]] = first * cos - second * sin
        turned[:, pairs[1]] = first * sin + second * cos
        return turned

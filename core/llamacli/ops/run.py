"""Arguments of ops that run in NumPy.

The rows of one sequence, and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kv import KVSequence
from llamacli.kv.layout import KVSpec
from llamacli.ops.values import Array, Tensor, Value


@attrs.frozen(eq=False)
class Span:
    """Consecutive tokens of a sequence within a batch.

    `n` tokens, from cell and position `start` of `sequence` on. `hidden`, float32 [n, n_embd], are the hidden states
    that `g.previous_hidden` reads; None for zeros.
    """

    sequence: KVSequence
    start: int
    n: int
    hidden: npt.NDArray[np.float32] | None = None


@attrs.frozen(eq=False)
class Run:
    """Arguments of `Op.compute`: n tokens of one sequence, at consecutive positions.

    - `run[value]`: float64 [n, width]; `run[tensor]`: float64 in the tensor's shape.
    - `tokens`: int32 [n]; `start`: the position of the first.
    - `sequence`: the cached keys and values; `states[i]`: the shape of those of layer i.
    - `hidden`: float32 [n, n_embd], hidden states of the tokens before; None for zeros.
    """

    tokens: npt.NDArray[np.int32]
    start: int
    sequence: KVSequence
    states: Sequence[KVSpec]
    values: Mapping[Value, npt.NDArray[np.float32]]
    weights: Callable[[Tensor], Array]
    hidden: npt.NDArray[np.float32] | None = None

    def __getitem__(self, what: Value | Tensor) -> Array:
        return self.weights(what) if isinstance(what, Tensor) else self.values[what].astype(np.float64)

    @property
    def n(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def positions(self) -> npt.NDArray[np.intp]:
        """Positions of the tokens, [n]."""
        return np.arange(self.start, self.start + self.n)

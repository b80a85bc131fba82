"""K-shift plan: dependence of cached keys on positions.

Found by following the ops that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.ops.base import Op
from llamacli.ops.key_shift import Keys, KeyShift
from llamacli.ops.store import Store
from llamacli.ops.values import Tensor, Value


class ShiftPlan:
    """Key shifts of each layer.

    `weight` gives a tensor in float32. Keys that do not depend on positions stay as they are; for others the op that
    made them is asked. Dependence through attention does not count: the tokens that a token attended to stay the same.
    """

    def __init__(self, ops: Sequence[Op], weight: Callable[[Tensor], npt.NDArray[Any]]):
        self._weight = weight
        self._makers = {op.out: op for op in ops}
        self._positional: set[Value] = set()
        for op in ops:
            depends = not op.mixes_tokens and any(value in self._positional for value in op.inputs())
            if op.uses_position or depends:
                self._positional.add(op.out)
        self._stores = {op.layer: op for op in ops if isinstance(op, Store)}
        self._lengths = sorted({length for op in ops for length in op.context_lengths()})

    def rope_variant(self, seq_len: int) -> int:
        """Number of the RoPE variant of a context length.

        A variant is a set of constants that a context of `seq_len` tokens is computed with.
        """
        return sum(seq_len > length for length in self._lengths)

    def tensors(self) -> set[Tensor]:
        """Tensors that shifts may read."""
        ops = self._upstream([store.k for store in self._stores.values()])
        return {tensor for op in ops for tensor in op.tensors() if tensor not in op.matrices()}

    def shift(self, layer: int, keys: Keys, by: int, seq_len: int) -> Keys:
        """Shift keys of a layer to positions `by` lower.

        `keys` and the result are float32 [n_head_kv, head_dim, n]. Raises InvalidRequestError naming the op through
        which keys cannot be shifted.
        """
        failed: list[Op] = []

        def of(value: Value, keys: Keys, is_normed: bool = False) -> Keys | None:
            if value not in self._positional:
                return keys
            op = self._makers[value]
            shifted = op.shift_keys(keys, KeyShift(by, seq_len, self._weight, of, is_normed))
            if shifted is None:
                failed.append(op)
            return shifted

        store = self._stores[layer]
        shifted = of(store.k, keys)
        moves_values = store.v in self._positional
        if shifted is not None and store.v is None:
            values = slice(store.value_dim)
            moves_values = not np.array_equal(shifted[:, values], keys[:, values], equal_nan=True)
        if shifted is None or moves_values:
            op = failed[0] if failed else self._makers[store.v or store.k]
            sources = " and ".join(sorted({type(op).__name__ for op in self._upstream([op.out]) if op.uses_position}))
            raise InvalidRequestError(
                f"the cached {'keys' if failed else 'values'} of layer {layer} cannot be moved to other positions: "
                f"{type(op).__name__} cannot undo how they depend on positions by {sources}"
            )
        return shifted

    def _upstream(self, values: list[Value]) -> set[Op]:
        found, pending = set[Op](), list(values)
        while pending:
            value = pending.pop()
            if value in self._positional and self._makers[value] not in found:
                found.add(self._makers[value])
                pending += self._makers[value].inputs()
        return found

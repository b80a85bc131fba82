"""K-shift plan: dependence of cached keys on positions.

Found by following the ops that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        found: set[Tensor] = set()
        pending, seen = [store.k for store in self._stores.values()], set[Value]()
        while pending:
            value = pending.pop()
            if value in self._positional and value not in seen:
                seen.add(value)
                op = self._makers[value]
                found |= set(op.tensors()) - set(op.matrices())
                pending += op.inputs()
        return found

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
        shifted = None if store.v in self._positional else of(store.k, keys)
        if shifted is None:
            op = failed[0] if failed else self._makers[store.v]
            sources = " and ".join(sorted(self._sources(op.out)))
            raise InvalidRequestError(
                f"the cached {'keys' if failed else 'values'} of layer {layer} cannot be moved to other positions: "
                f"{type(op).__name__} cannot undo how they depend on positions by {sources}"
            )
        return shifted

    def _sources(self, value: Value) -> set[str]:
        """Names of the ops by which a value depends on positions."""
        op = self._makers[value]
        inputs = [x for x in op.inputs() if x in self._positional]
        names = {type(op).__name__} if op.uses_position else set[str]()
        return names.union(*(self._sources(x) for x in inputs))

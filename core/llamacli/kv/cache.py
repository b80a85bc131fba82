"""Keys and values of one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.graph import AttentionState

PAGE = 16
"""Positions are kept in pages of this many: one vector register's lanes."""

KV_TYPES: dict[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
"""The cache types by their GGUF names."""


class KVCache:
    """Keys and values of every attention layer for up to `seq_len` positions.

    `k[layer]` is [n_pages, n_head_kv, head_dim, PAGE]: within a page, the positions are what lies side by side, so that
    the scores of a query against PAGE keys need no sum across lanes. `v[layer]` is [n_pages, n_head_kv, PAGE,
    head_dim]. `addresses` is int64 [n_layer, 2], where the two begin. Memory is zeroed, and the system commits it as it
    is first written to.
    """

    def __init__(self, states: Sequence[AttentionState], seq_len: int, kv_type: str):
        if kv_type not in KV_TYPES:
            raise InvalidRequestError(f"kv_type {kv_type!r} is not one of {', '.join(KV_TYPES)}")
        self.kv_type, self.seq_len = kv_type, seq_len
        n_pages = -(-seq_len // PAGE)
        self.k = [self._zeros(n_pages, state.n_head_kv, state.head_dim, PAGE) for state in states]
        self.v = [self._zeros(n_pages, state.n_head_kv, PAGE, state.head_dim) for state in states]
        self.addresses = np.array([[k.ctypes.data, v.ctypes.data] for k, v in zip(self.k, self.v, strict=True)])

    def _zeros(self, *shape: int) -> npt.NDArray[np.floating[Any]]:
        # A vector more than the shape holds: kernels read whole vectors, also where a row of values ends within one.
        flat = np.zeros(math.prod(shape) + PAGE, KV_TYPES[self.kv_type])
        return flat[:-PAGE].reshape(shape)

    @property
    def n_bytes(self) -> int:
        """Bytes reserved: 2 x n_layer x seq_len x n_head_kv x head_dim x bytes an element, whole pages of positions."""
        return sum(array.nbytes for array in (*self.k, *self.v))

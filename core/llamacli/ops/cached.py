"""Base class of ops that read the KV cache.

Such as attention of other kinds than `g.attention`.
"""

from __future__ import annotations

import abc
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.ops.base import Op, expect
from llamacli.ops.lowering import NO_LIMIT, Lowering
from llamacli.ops.run import Run
from llamacli.ops.store import cache_slot
from llamacli.ops.values import Array


@attrs.frozen(eq=False)
class CacheOp(Op):
    """Op that reads the keys and values that `g.store` has cached.

    `layer` is that of the `KeyValues` which `g.store` returned. A token sees the cells of its sequence that are in the
    layer's window and chunk, up to its own or to the end of its bidirectional span. A subclass defines `attend` in
    NumPy, and in `lower` appends a kernel that `cache_kernel` makes, whose fields include `cache_params`.
    """

    mixes_tokens = True

    layer: int

    @abc.abstractmethod
    def attend(self, run: Run, i: int, first: int, keys: Array, values: Array) -> npt.NDArray[Any]:
        """Compute row i of a run, in NumPy: [out.width].

        `keys` are float64 [n_head_kv, n, head_dim], `values` [n_head_kv, n, value_dim]: those of the n cells that the
        token sees, from cell `first` on. Its own cell is `run.start` + i.
        """

    def compute(self, run: Run) -> Array:
        state = run.states[self.layer]
        keys, values = run.sequence.read(self.layer, run.start + run.n)
        rows = []
        for i in range(run.n):
            seen = run.seen(i, (state.window or NO_LIMIT) - 1, 0, state.chunk)
            some = (np.ascontiguousarray(part[:, seen], np.float64) for part in (keys.swapaxes(1, 2), values))
            rows.append(self.attend(run, i, seen.start, *some))
        return np.array(rows).reshape(run.n, self.out.width)

    def cache_params(self, to: Lowering, n_head: int, n_numbers: int = 0) -> dict[str, Any]:
        """Arguments of `to.step` for its kernel: CACHE_FIELDS, and what the step reads.

        `n_head` are the heads of queries; `n_numbers` float32 of memory are the kernel's own in each thread.
        """
        from llamacli.kernels.cached import cells_bytes

        state = to.states[self.layer]
        expect(type(self).__name__, n_head % state.n_head_kv == 0, f"{n_head} heads and {state.n_head_kv} of the cache")
        return {
            "reads": [cache_slot(self.layer)], "work_seen": float(n_head * (state.head_dim + state.value_dim)),
            "layer": self.layer, "n_head": n_head, "n_head_kv": state.n_head_kv, "head_dim": state.head_dim,
            "value_dim": state.value_dim, "values_in_keys": state.values_in_keys, "window": state.window or NO_LIMIT,
            "chunk": state.chunk or NO_LIMIT,
            "cells": to.scratch(cells_bytes(state.head_dim, state.value_dim, n_numbers)),
        }  # fmt: skip

"""How keys and values lie in memory.

Tokens are kept in cells, PAGE cells to a page. A page is one stretch of memory with those cells of every layer that
forgets at the same pace: the layers that see everything, and those of each sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.graph import AttentionState

PAGE = 16
"""Cells of a page: one vector register's lanes."""

N_BATCH = 512
"""Tokens that are evaluated at once at the most."""

KV_TYPES: dict[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
"""The cache types by their GGUF names."""


@attrs.frozen
class Place:
    """Where a layer's cells are: the group of layers whose pages hold them, and the offsets in these, in bytes.

    In a page, keys are [n_head_kv, head_dim, PAGE] and values [n_head_kv, PAGE, head_dim]. The cells of keys lie side
    by side, so that the scores of a query against a page of them need no sum across lanes.
    """

    group: int
    keys: int
    values: int


@attrs.frozen
class Group:
    """Layers that share pages: those of one window, or of none."""

    window: int | None
    page_bytes: int


@attrs.frozen
class KVLayout:
    """The layout of what `states` say, as `kv_type`."""

    states: tuple[AttentionState, ...]
    kv_type: str
    groups: tuple[Group, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, states: Sequence[AttentionState], kv_type: str) -> KVLayout:
        """Raises InvalidRequestError for an unknown type."""
        if kv_type not in KV_TYPES:
            raise InvalidRequestError(f"kv_type {kv_type!r} is not one of {', '.join(KV_TYPES)}")
        size = np.dtype(KV_TYPES[kv_type]).itemsize
        windows = list(dict.fromkeys(state.window for state in states))
        filled = [0] * len(windows)
        places = []
        for state in states:
            group = windows.index(state.window)
            part = state.n_head_kv * state.head_dim * PAGE * size
            places.append(Place(group, filled[group], filled[group] + part))
            filled[group] += 2 * part
        groups = tuple(Group(window, n_bytes) for window, n_bytes in zip(windows, filled, strict=True))
        return cls(tuple(states), kv_type, groups, tuple(places))

    def n_bytes(self, seq_len: int) -> int:
        """Bytes that a sequence of `seq_len` tokens takes at the most.

        Without windows this is 2 x seq_len x n_layer x n_head_kv x head_dim x bytes an element, whole pages of cells.
        """
        return sum(group.page_bytes * self.n_pages(group, seq_len) for group in self.groups)

    @staticmethod
    def n_pages(group: Group, seq_len: int) -> int:
        """Pages of a group that a sequence holds at once, at the most."""
        whole = math.ceil(seq_len / PAGE)
        if group.window is None:
            return whole
        # The window before a batch, and the batch; both may begin within a page.
        return min(whole, math.ceil((group.window - 1 + N_BATCH) / PAGE) + 1)

"""How keys and values lie in memory.

Tokens are kept in cells, PAGE cells to a page. A page is one stretch of memory with those cells of every layer that
forgets at the same pace: the layers that see everything, and those of each sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, KVType

N_BATCH = 512
"""Tokens that are evaluated at once at the most."""


@attrs.frozen
class KVSpec:
    """Shape of the keys and values that one attention layer caches: `n_head_kv` heads of `head_dim` numbers a token.

    With a `window`, a token at position p attends to positions p - window + 1 to p; older cells may be evicted.
    """

    n_head_kv: int
    head_dim: int
    window: int | None = None


@attrs.frozen
class Place:
    """Where a layer's cells are: the group of layers whose pages hold them, and the offsets in these, in bytes.

    There, parts of the heads follow one another: `key_bytes` and `value_bytes` each; see `kernels.kv_types.types`.
    """

    group: int
    keys: int
    values: int
    key_bytes: int
    value_bytes: int


@attrs.frozen
class Group:
    """Layers that share pages: those of one window, or of none."""

    window: int | None
    page_bytes: int


@attrs.frozen
class KVLayout:
    """The layout of what `states` say, as `kv_type`."""

    states: tuple[KVSpec, ...]
    kv_type: KVType
    groups: tuple[Group, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, states: Sequence[KVSpec], kv_type: KVType | str | tuple[str, str]) -> KVLayout:
        """Raises InvalidRequestError for an unknown type."""
        kv_type = KVType.of(kv_type)
        windows = list(dict.fromkeys(state.window for state in states))
        filled = [0] * len(windows)
        places = []
        for state in states:
            group = windows.index(state.window)
            sizes = [KV_TYPES[name].part_bytes(state.head_dim) for name in (kv_type.k, kv_type.v)]
            start = filled[group]
            places.append(Place(group, start, start + state.n_head_kv * sizes[0], *sizes))
            filled[group] += state.n_head_kv * sum(sizes)
        groups = tuple(Group(window, n_bytes) for window, n_bytes in zip(windows, filled, strict=True))
        return cls(tuple(states), kv_type, groups, tuple(places))

    @property
    def forgets(self) -> bool:
        """Whether there are sliding windows."""
        return any(group.window is not None for group in self.groups)

    def n_bytes(self, seq_len: int) -> int:
        """Bytes that a sequence of `seq_len` tokens takes at the most.

        Without windows this is 2 x seq_len x n_layer x n_head_kv x head_dim x bytes an element, whole pages of cells;
        integers take as many bytes as GGML's blocks of them, 34 for 32 of q8_0.
        """
        return sum(group.page_bytes * self.n_pages(group, seq_len) for group in self.groups)

    @staticmethod
    def n_pages(group: Group, seq_len: int) -> int:
        """Pages of a group that a sequence holds at once, at the most."""
        whole = math.ceil(seq_len / PAGE)
        if group.window is None:
            return whole
        # The window before the last token that was evaluated, which may be again, and a batch; begun within a page.
        return min(whole, math.ceil((group.window + N_BATCH) / PAGE) + 1)

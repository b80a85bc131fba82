"""Memory layout of the KV cache: groups, pages and byte offsets.

A cell holds one token; a page holds PAGE cells of every layer of one group. Layers with the same sliding window form a
group, and layers without a window another, because the cells of a group are evicted together. The recurrent states of
all layers are one group more, whose page holds the states after one token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs

from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, KVType
from llamacli.kernels.layout import RECURRENT_SLOTS

N_BATCH = 512
"""Maximum batch size: tokens that one forward pass evaluates."""

_ALIGNMENT = 64


@attrs.frozen
class KVSpec:
    """Shape of the keys and values that one attention layer caches.

    A token has `n_head_kv` keys of `head_dim` numbers and as many values of `value_dim`, by default the same. With
    `values_in_keys`, a value is the first `value_dim` numbers of its key, and is not stored (multi-head latent
    attention). With a `window`, a token at position p attends to positions p - window + 1 to p; with a `chunk`, to
    those from p // chunk * chunk on. Older cells may be evicted.
    """

    n_head_kv: int
    head_dim: int
    window: int | None = None
    value_dim: int = attrs.field(default=attrs.Factory(lambda self: self.head_dim, takes_self=True))
    values_in_keys: bool = False
    chunk: int | None = None


@attrs.frozen
class RecurrentSpec:
    """Shape of a recurrent state: float32, one for each sequence.

    It is zero before the first token, and each token replaces it. `name` says in errors and files what it is.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return 4 * math.prod(self.shape)


@attrs.frozen
class Held:
    """Numbers of the layers and recurrent states of a pipeline stage.

    They are those of the whole model.
    """

    layers: frozenset[int]
    states: frozenset[int]


@attrs.frozen
class Place:
    """Location of one layer's cells: group and byte offsets in a page.

    At each offset the parts of all heads follow one another, `key_bytes` or `value_bytes` each; see
    `kernels.kv_types.types`. Values that are parts of keys take no bytes, nor do layers of other pipeline stages.
    """

    group: int
    keys: int
    values: int
    key_bytes: int
    value_bytes: int


@attrs.frozen
class Group:
    """Layers that share pages: those with the same sliding window or chunk.

    Both are None for layers that see all positions. The group of recurrent states has no cells; see
    `llamacli.kv.recurrent`.
    """

    window: int | None
    chunk: int | None
    page_bytes: int
    recurrent: bool = False

    @property
    def evicts(self) -> bool:
        """True if cells outside of the window or chunk are evicted."""
        return self.window is not None or self.chunk is not None

    def has(self, position: int, first: int) -> bool:
        """True if the cells from `first` on are enough for `position`."""
        return not self.evicts or self.first_seen(position) >= first

    def first_seen(self, position: int) -> int:
        """First position that a token at `position` attends to."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


@attrs.frozen
class KVLayout:
    """Layout of the layers `specs`, stored as `kv_type`, and of recurrent states.

    - `groups`: the groups of layers; that of the recurrent states is the last, if there are any.
    - `places`: where the cells of each layer lie.
    - `recurrent`, `offsets`: the recurrent states, and at which byte of a page of their group each lies.
    - `held`: what a pipeline stage has of them, None for all. Other layers and states have places of no bytes, so that
      all stages have the same groups and page tables.
    - `has_windows`: true if a layer has a sliding window or chunks.
    """

    specs: tuple[KVSpec, ...]
    kv_type: KVType
    groups: tuple[Group, ...]
    places: tuple[Place, ...]
    recurrent: tuple[RecurrentSpec, ...] = ()
    offsets: tuple[int, ...] = ()
    held: Held | None = None
    has_windows: bool = attrs.field(init=False)

    @has_windows.default
    def _(self) -> bool:
        return any(group.evicts for group in self.groups)

    @classmethod
    def of(
        cls,
        specs: Sequence[KVSpec],
        kv_type: KVType | str | tuple[str, str],
        recurrent: Sequence[RecurrentSpec] = (),
        held: Held | None = None,
    ) -> KVLayout:
        """Compute the layout. Raises InvalidRequestError for an unknown type."""
        kv_type = KVType.of(kv_type)
        ranges = list(dict.fromkeys((spec.window, spec.chunk) for spec in specs))
        filled = [0] * len(ranges)
        places = []
        for i, spec in enumerate(specs):
            if held is not None and i not in held.layers:
                places.append(Place(ranges.index((spec.window, spec.chunk)), 0, 0, 0, 0))
                continue
            group = ranges.index((spec.window, spec.chunk))
            key_bytes = KV_TYPES[kv_type.k].part_bytes(spec.head_dim)
            value_bytes = 0 if spec.values_in_keys else KV_TYPES[kv_type.v].part_bytes(spec.value_dim)
            start = filled[group]
            places.append(Place(group, start, start + spec.n_head_kv * key_bytes, key_bytes, value_bytes))
            filled[group] += spec.n_head_kv * (key_bytes + value_bytes)
        groups = [Group(*seen, n_bytes) for seen, n_bytes in zip(ranges, filled, strict=True)]
        sizes = [spec.n_bytes if held is None or i in held.states else 0 for i, spec in enumerate(recurrent)]
        ends = list(itertools.accumulate(-(-n_bytes // _ALIGNMENT) * _ALIGNMENT for n_bytes in sizes))
        if recurrent:
            groups.append(Group(None, None, ends[-1], recurrent=True))
        offsets = (0, *ends[:-1]) if recurrent else ()
        return cls(tuple(specs), kv_type, tuple(groups), tuple(places), tuple(recurrent), offsets, held)

    def n_bytes(self, seq_len: int) -> int:
        """Maximum size in bytes of a sequence of `seq_len` tokens.

        Without windows this is seq_len x n_layer x n_head_kv x (head_dim + value_dim) x bytes an element, in whole
        pages; quantized types take the bytes of GGML's blocks, such as 34 for 32 numbers of q8_0. Recurrent
        states do not grow with the length.
        """
        return sum(group.page_bytes * self.n_pages(group, seq_len) for group in self.groups)

    @staticmethod
    def n_pages(group: Group, seq_len: int) -> int:
        """Maximum number of a group's pages that a sequence holds at once."""
        if group.recurrent:
            return len(RECURRENT_SLOTS)
        whole = math.ceil(seq_len / PAGE)
        if not group.evicts:
            return whole
        n_seen = min(n for n in (group.window, group.chunk) if n is not None)
        # The window of the last token, which may be evaluated again, and a batch, starting in the middle of a page.
        return min(whole, math.ceil((n_seen + N_BATCH) / PAGE) + 1)

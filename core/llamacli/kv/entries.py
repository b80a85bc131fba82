"""KV caches used entry by entry, without a model."""

from __future__ import annotations

import attrs
import numpy as np

from llamacli.errors import CacheFull, InvalidRequestError
from llamacli.kernels.kv_types.rounding import Floats
from llamacli.kernels.kv_types.types import PAGE, KVType
from llamacli.kv.layout import KVLayout, KVSpec
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.kv.strategies import CacheStrategy
from llamacli.util.numbers import is_integer


@attrs.frozen(eq=False)
class KVCacheEntry:
    """Cached key and value of one position, float32 [num_heads, head_dim] each."""

    position: int
    key: Floats
    value: Floats


class LayerKVCache:
    """KV cache of one layer, by position.

    With a `window`, a ring buffer: a new entry replaces the one `window` positions before it. Without, `append` raises
    CacheFull after `max_seq_len` positions.
    """

    def __init__(
        self,
        max_seq_len: int,
        head_dim: int,
        num_heads: int,
        *,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        window: int | None = None,
        sequence: KVSequence | None = None,
        layer: int = 0,
    ):
        self.max_seq_len, self.head_dim, self.num_heads, self.window = max_seq_len, head_dim, num_heads, window
        self.strategy = CacheStrategy.of(strategy)
        self._sequence = sequence or _new_sequence(1, num_heads, head_dim, window or max_seq_len)
        self._layer = layer
        self._length = 0
        self._positions = [-1] * (window or max_seq_len)  # position in each cell, -1 if empty

    def __len__(self) -> int:
        return self._length

    @property
    def entries(self) -> list[KVCacheEntry]:
        """All cached entries, by position."""
        found = (self.get(position) for position in sorted(self._positions) if position >= 0)
        return [entry for entry in found if entry is not None]

    def append(self, key: Floats, value: Floats) -> None:
        """Append the next key and value; CacheFull, InvalidRequestError for wrong shapes."""
        shape = (self.num_heads, self.head_dim)
        for name, array in (("key", key), ("value", value)):
            if np.shape(array) != shape:
                raise InvalidRequestError(f"{name} has shape {np.shape(array)} instead of {shape}")
        if self.window is None and self._length == self.max_seq_len:
            raise CacheFull(f"the cache holds {self.max_seq_len} positions and may not evict any")
        cell = self._length % len(self._positions)
        if self.strategy.caches(self._length + 1):
            self._sequence.reserve(cell, 1)
            self._sequence.write(self._layer, cell, np.asarray([key], np.float32), np.asarray([value], np.float32))
            self._positions[cell] = self._length
        else:
            self._positions[cell] = -1
        self._length += 1

    def get(self, position: int) -> KVCacheEntry | None:
        """Get the entry of a position; None if not cached."""
        if not is_integer(position) or position < 0:
            return None
        cell = position % len(self._positions)
        if self._positions[cell] != position:
            return None
        keys, values = self._sequence.read_cell(self._layer, cell)
        return KVCacheEntry(position, keys, values)

    def evict(self, n: int) -> None:
        """Evict the entries of all positions below n."""
        self._positions = [-1 if position < n else position for position in self._positions]

    def clear(self) -> None:
        """Evict all entries and restart at position 0."""
        self._length = 0
        self.evict(1 << 62)

    def compact(self) -> None:
        """Release pages without entries."""
        self._sequence.release_pages(set(range(-(-len(self._positions) // PAGE))) - self.pages())

    def pages(self) -> set[int]:
        """Numbers of the pages that hold entries."""
        return {cell // PAGE for cell, position in enumerate(self._positions) if position >= 0}


class ModelKVCache:
    """KV cache of all layers. Memory is allocated as entries are appended."""

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        *,
        window: int | None = None,
        pool: KVPool | None = None,
    ):
        self.num_layers, self.strategy, self.window = num_layers, CacheStrategy.of(strategy), window
        self._sequence = _new_sequence(num_layers, num_heads, head_dim, window or max_seq_len, pool)
        self.layers = tuple(
            LayerKVCache(
                max_seq_len, head_dim, num_heads, strategy=strategy, window=window, sequence=self._sequence, layer=i
            )
            for i in range(num_layers)
        )

    @property
    def n_bytes(self) -> int:
        """Size of the allocated pages in bytes."""
        sequence = self._sequence
        tables = zip(sequence.pool.groups, sequence.tables, strict=True)
        return sum(int(np.count_nonzero(table)) * pages.page_bytes for pages, table in tables)

    def append(self, layer: int, key: Floats, value: Floats) -> None:
        """See LayerKVCache."""
        self._layer(layer).append(key, value)

    def get(self, layer: int, position: int) -> KVCacheEntry | None:
        """See LayerKVCache."""
        return self._layer(layer).get(position)

    def clear(self) -> None:
        """Evict all entries but keep their memory for new ones."""
        for layer in self.layers:
            layer.clear()

    def compact(self) -> None:
        """Release pages without entries in any layer."""
        used = set().union(*(layer.pages() for layer in self.layers))
        n_slots = min(self._sequence.extent[0], len(self._sequence.tables[0]))
        self._sequence.release_pages(set(range(n_slots)) - used)

    def close(self) -> None:
        """Release all memory."""
        self.clear()
        self._sequence.close()

    def _layer(self, layer: int) -> LayerKVCache:
        if not is_integer(layer) or not 0 <= layer < self.num_layers:
            raise InvalidRequestError(f"layer {layer!r} is not one of 0 to {self.num_layers - 1}")
        return self.layers[layer]


class SlidingWindowKVCache(ModelKVCache):
    """KV cache that keeps the last `window` positions of each layer."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, window: int):
        if not is_integer(window) or window < 1:
            raise InvalidRequestError(f"window must be an integer of at least 1, not {window!r}")
        super().__init__(num_layers, num_heads, head_dim, window, window=window)


class MultiSequenceKVCache:
    """Up to `max_sequences` independent KV caches by id, over one memory pool."""

    def __init__(
        self,
        max_sequences: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
    ):
        if not is_integer(max_sequences) or max_sequences < 0:
            raise InvalidRequestError(f"max_sequences must be an integer of at least 0, not {max_sequences!r}")
        self.max_sequences = max_sequences
        self._pool = _new_sequence(num_layers, num_heads, head_dim, max_seq_len).pool
        self._arguments = (num_layers, num_heads, head_dim, max_seq_len, strategy)
        self._caches: dict[int, ModelKVCache] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._caches

    def add(self, sequence_id: int) -> ModelKVCache:
        """Add a sequence; CacheFull beyond `max_sequences`, InvalidRequestError for an id in use."""
        if sequence_id in self._caches:
            raise InvalidRequestError(f"sequence {sequence_id!r} exists already")
        if len(self._caches) >= self.max_sequences:
            raise CacheFull(f"all {self.max_sequences} sequences are in use")
        self._caches[sequence_id] = ModelKVCache(*self._arguments, pool=self._pool)
        return self._caches[sequence_id]

    def get(self, sequence_id: int) -> ModelKVCache | None:
        """Get the cache of a sequence; None if there is none."""
        return self._caches.get(sequence_id)

    def remove(self, sequence_id: int) -> None:
        """Remove a sequence, release its memory; InvalidRequestError if there is none."""
        if sequence_id not in self._caches:
            raise InvalidRequestError(f"there is no sequence {sequence_id!r}")
        self._caches.pop(sequence_id).close()


def _new_sequence(
    n_layers: int, n_heads: int, head_dim: int, n_cells: int, pool: KVPool | None = None
) -> KVSequence:  # fmt: skip
    for name, value in (("layers", n_layers), ("heads", n_heads), ("head_dim", head_dim), ("length", n_cells)):
        if not is_integer(value) or value < 1:
            raise InvalidRequestError(f"{name} must be an integer of at least 1, not {value!r}")
    spec = KVSpec(n_heads, head_dim)
    return KVSequence(pool or KVPool(KVLayout.of([spec] * n_layers, KVType("f32", "f32"))), n_cells)

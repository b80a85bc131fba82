"""KV cache: paged memory, sequences, prefix cache, leases, snapshots.

- `layout`, `pool`, `sequence`: pages of cells, their memory, and one sequence of tokens.
- `recurrent`: the states of recurrent layers, which each token replaces.
- `prefixes`: finds cached sequences that share a token prefix. `prompt_cache`: keeps them on disk.
- `cache`, `sequence_pool`: numbered sequences, and leases of them.
- `snapshot`: serialization.
- `strategies`, `entries`: whether to cache at all; caches used entry by entry, without a model.
"""

from llamacli.errors import CacheFull, OutOfMemoryError
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, KVType
from llamacli.kv.cache import FileData, KVCache, log_build_info
from llamacli.kv.entries import (
    KVCacheEntry,
    LayerKVCache,
    ModelKVCache,
    MultiSequenceKVCache,
    SlidingWindowKVCache,
)
from llamacli.kv.layout import N_BATCH, KVLayout, KVSpec, RecurrentSpec
from llamacli.kv.pool import KVPool
from llamacli.kv.prefixes import PrefixIndex
from llamacli.kv.sequence import KVSequence
from llamacli.kv.sequence_pool import NO_LEASE, SequencePool
from llamacli.kv.strategies import CacheStrategy

__all__ = [
    "KV_TYPES",
    "NO_LEASE",
    "N_BATCH",
    "PAGE",
    "CacheFull",
    "CacheStrategy",
    "FileData",
    "KVCache",
    "KVCacheEntry",
    "KVLayout",
    "KVPool",
    "KVSequence",
    "KVSpec",
    "KVType",
    "LayerKVCache",
    "ModelKVCache",
    "MultiSequenceKVCache",
    "OutOfMemoryError",
    "PrefixIndex",
    "RecurrentSpec",
    "SequencePool",
    "SlidingWindowKVCache",
    "log_build_info",
]

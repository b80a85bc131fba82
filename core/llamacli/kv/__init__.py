"""Keys and values of the tokens so far, and what lives on them."""

from llamacli.errors import CacheFull, OutOfMemoryError
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, KVType
from llamacli.kv.cache import KVCache
from llamacli.kv.layout import N_BATCH, KVLayout, KVSpec
from llamacli.kv.pool import KVPool
from llamacli.kv.prefixes import PrefixIndex
from llamacli.kv.sequence import KVSequence
from llamacli.kv.sequence_pool import NO_LEASE, Tenancy
from llamacli.kv.strategies import (
    CacheStrategy,
    KVCacheEntry,
    LayerKVCache,
    ModelKVCache,
    MultiSequenceKVCache,
    SlidingWindowKVCache,
)

__all__ = [
    "KV_TYPES",
    "NO_LEASE",
    "N_BATCH",
    "PAGE",
    "CacheFull",
    "CacheStrategy",
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
    "SlidingWindowKVCache",
    "Tenancy",
]

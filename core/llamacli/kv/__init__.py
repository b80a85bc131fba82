"""Keys and values of the tokens so far."""

from llamacli.kv.layout import KV_TYPES, N_BATCH, PAGE, KVLayout
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence

__all__ = ["KV_TYPES", "N_BATCH", "PAGE", "KVLayout", "KVPool", "KVSequence"]

"""Keys and values of the tokens so far."""

from llamacli.kv.layout import N_BATCH, KVLayout
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.kv.types import KV_TYPES, PAGE, KVType

__all__ = ["KV_TYPES", "N_BATCH", "PAGE", "KVLayout", "KVPool", "KVSequence", "KVType"]

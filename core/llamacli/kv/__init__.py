"""The KV cache: what the attention layers keep of the tokens evaluated so far."""

from llamacli.kv.cache import KV_TYPES, PAGE, KVCache

__all__ = ["KV_TYPES", "PAGE", "KVCache"]

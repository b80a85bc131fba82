"""Tiny models of L2Llama: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_architecture
from llamacli_l2 import L2Llama

KEYS = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-05,
    "attention.layer_norm_epsilon": None,
}
"""Keys of the tiny models, without `l2llama.` in front."""

VARIANTS = {
    "l2llama": (write_architecture, {"architecture": L2Llama(), "keys": KEYS}, 1e-8),
}

"""Tiny models of ExampleHybrid: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_architecture
from llamacli_example_hybrid import ExampleHybrid

KEYS = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-05,
    "full_attention_interval": 2,
    "shortconv.l_cache": 3,
    "attention.layer_norm_epsilon": None,
}
"""Keys of the tiny models, without `example-hybrid.` in front."""

VARIANTS = {
    "example_hybrid": (write_architecture, {"architecture": ExampleHybrid(), "keys": KEYS}, 1e-8),
}

"""Tiny models of ExampleDense: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_architecture
from llamacli_example_dense import ExampleDense

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
"""Keys of the tiny models, without `example-dense.` in front."""

VARIANTS = {
    "example_dense": (write_architecture, {"architecture": ExampleDense(), "keys": KEYS}, 1e-8),
}

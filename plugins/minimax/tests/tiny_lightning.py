"""Tiny models of MiniMax-Text-01 and MiniMax-M3."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_minimax.lightning import MiniMax01
from llamacli_minimax.m3 import MiniMaxM3

_KEYS = {"expert_count": 8, "expert_used_count": 2, "residual_scale": 3.5, "rope.dimension_count": 8}

LIGHTNING: dict[str, dict[str, Any]] = {
    "minimax_01": _KEYS | {"block_count": 3, "full_attention_interval": 2, "attention.head_count_kv": 2},
    "minimax_01_layers": _KEYS | {"attention.recurrent_layers": [False, True], "attention.head_count_kv": 1},
}
"""Keys by the variant's name."""

_SPARSE = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_gating_func": 2, "rope.dimension_count": 8, "leading_dense_block_count": 0,
    "attention.indexer.head_count": 2, "attention.indexer.key_length": 32, "attention.indexer.top_k": 3,
    "attention.indexer.block_size": 4, "attention.indexer.local_blocks": 1,
}  # fmt: skip

SPARSE: dict[str, dict[str, Any]] = {
    "minimax_m3": _SPARSE | {"block_count": 3, "expert_weights_norm": True, "expert_weights_scale": 1.5},
    "minimax_m3_dense": _SPARSE | {
        "leading_dense_block_count": 1, "expert_used_count": 8, "attention.indexer.top_k": 100,
    },
    "minimax_m3_mqa": _SPARSE | {
        "attention.head_count_kv": 1, "attention.indexer.head_count": 1, "attention.indexer.block_size": 2,
        "attention.indexer.local_blocks": 2,
    },
}  # fmt: skip
"""Keys by the variant's name."""

INERT = ("minimax_m3_dense:*.indexer.*", "minimax_m3_dense:*.exp_probs_b.bias")
"""An indexer that chooses all cells, and a bias of all experts."""

VARIANTS = {
    name: (write_architecture, {"architecture": MiniMax01(), "keys": keys, "optional": name == "minimax_01"}, 1e-9)
    for name, keys in LIGHTNING.items()
} | {
    name: (
        write_architecture,
        {"architecture": MiniMaxM3(), "keys": keys, "optional": name == "minimax_m3"},
        1e-5 if name == "minimax_m3_dense" else 1e-9,  # llama.cpp rounds keys and values of dense blocks to float16
    )
    for name, keys in SPARSE.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

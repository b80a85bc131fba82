"""Tiny models of MiniMax-Text-01."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_minimax.lightning import MiniMax01

_KEYS = {"expert_count": 8, "expert_used_count": 2, "residual_scale": 3.5, "rope.dimension_count": 8}

LIGHTNING: dict[str, dict[str, Any]] = {
    "minimax_01": _KEYS | {"block_count": 3, "full_attention_interval": 2, "attention.head_count_kv": 2},
    "minimax_01_layers": _KEYS | {"attention.recurrent_layers": [False, True], "attention.head_count_kv": 1},
}
"""Keys by the variant's name."""

VARIANTS = {
    name: (write_architecture, {"architecture": MiniMax01(), "keys": keys, "optional": name == "minimax_01"}, 1e-9)
    for name, keys in LIGHTNING.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

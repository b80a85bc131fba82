"""Tiny models of Cohere 2 with experts."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_cohere.mixture import Cohere2Moe

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_COMMON = _EXPERTS | {"attention.sliding_window": 8, "leading_dense_block_count": 1, "logit_scale": 0.25}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Cohere2Moe(): {
        "cohere2moe": _COMMON | {
            "block_count": 3, "attention.layer_norm_rms_epsilon": None, "expert_shared_count": 2,
        },
        "cohere2moe_rms": _COMMON | {
            "expert_gating_func": 1, "expert_weights_norm": True, "attention.sliding_window_pattern": [True, False],
        },
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"cohere2moe_rms"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

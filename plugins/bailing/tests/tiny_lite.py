"""Tiny models of Ling-lite."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_bailing.lite import BailingMoe

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    BailingMoe(): {
        "bailingmoe": _EXPERTS | {"expert_shared_count": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        "bailingmoe_plain": _EXPERTS | {"expert_shared_count": 1, "leading_dense_block_count": 1},
    },
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"bailingmoe_plain"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

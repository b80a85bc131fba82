"""Tiny models of Hunyuan 3."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_hunyuan.hy3 import HyV3

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    HyV3(): {
        "hy_v3": _EXPERTS | {"leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        "hy_v3_nextn": _EXPERTS
        | {"block_count": 3, "nextn_predict_layers": 1, "expert_shared_feed_forward_length": 64},
    },
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"hy_v3_nextn"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

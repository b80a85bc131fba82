"""Tiny models of Mellum."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_qwen.mellum import Mellum

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Mellum(): {
        "mellum": _EXPERTS | _YARN | {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
        "mellum_full": _EXPERTS,
    },
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"mellum_full"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

"""Tiny models of Granite with sliding windows, and with switched adapters."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_granite.switch import GraniteSwitch
from llamacli_granite.windows import GraniteSwa

_SCALES = {
    "embedding_scale": 6.0, "residual_scale": 0.4, "attention.scale": 0.1, "logit_scale": 4.0,
}  # fmt: skip
_SLIDING = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}
_ADAPTERS = {
    "adapters.count": 3, "adapters.lora_rank": 8, "adapters.token_ids_activate": [47, 30, 53],
    "adapters.token_ids_substitute": [1, 2, 5],
}  # fmt: skip

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    GraniteSwa(): {
        "granite_swa": _SCALES | _SLIDING | {"attention.rope_pattern": [False, True]},
        "granite_swa_moe": _SLIDING | {
            "logit_scale": 1.0, "expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 32,
        },
    },
    GraniteSwitch(): {
        "graniteswitch": _SCALES | _ADAPTERS,
        "graniteswitch_plain": {"logit_scale": 1.0, "rope.scaling.finetuned": False} | _ADAPTERS | {
            "adapters.router_gain": 3.0,
        },
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"granite_swa_moe", "graniteswitch_plain"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

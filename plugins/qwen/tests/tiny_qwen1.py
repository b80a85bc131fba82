"""Tiny models of Qwen 1."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_qwen.qwen1 import Qwen

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Qwen(): {"qwen": {"attention.head_count_kv": 4, "feed_forward_length": 192}},
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN: set[str] = set()

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

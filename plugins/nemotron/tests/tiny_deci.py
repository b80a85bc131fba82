"""Tiny models of Llama-Nemotron."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_nemotron.deci import Deci

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Deci(): {
        "deci": {
            "block_count": 5, "attention.head_count": [4, 8, 0, 0, 4], "attention.head_count_kv": [2, 4, 0, 0, 0],
            "feed_forward_length": [96, 64, 0, 32, 128], "attention.key_length": 16,
        },
        "deci_same": {},
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"deci_same"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

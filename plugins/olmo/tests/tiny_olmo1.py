"""Tiny models of OLMo 1."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_olmo.olmo1 import Olmo

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Olmo(): {"olmo": {"attention.clamp_kqv": 0.5}, "olmo_unclamped": {}},
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN: set[str] = {"olmo_unclamped"}

VARIANTS = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

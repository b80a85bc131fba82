"""Tiny models of RWKV-6, QRWKV-6 and ARWKV-7."""

from typing import Any

import numpy as np

from llamacli.testing import write_architecture
from llamacli_rwkv.arwkv import Arwkv7
from llamacli_rwkv.v6 import Rwkv6, Rwkv6Qwen2

_V6 = {
    "wkv.head_size": 16, "time_mix_extra_dim": 32, "time_decay_extra_dim": 32, "attention.head_count": 0,
    "attention.head_count_kv": None,
}  # fmt: skip
_V7 = {
    "wkv.head_size": 64, "embedding_length": 128, "attention.decay_lora_rank": 32, "attention.iclr_lora_rank": 32,
    "attention.value_residual_mix_lora_rank": 32, "token_shift_count": 1, "attention.head_count": 0,
    "attention.head_count_kv": None,
}  # fmt: skip
"""The peer's sums over heads need widths that are multiples of 64."""

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Rwkv6(): {"rwkv6": _V6 | {"rescale_every_n_layers": 2, "block_count": 3}},
    Rwkv6Qwen2(): {"rwkv6qwen2": _V6 | {"attention.head_count_kv": 2, "token_shift_count": 1}},
    Arwkv7(): {"arwkv7": _V7 | {"attention.gate_lora_rank": 32}, "arwkv7_plain": _V7},
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN: set[str] = {"arwkv7_plain"}

_FIRST = {f"blk.0.time_mix_v{i}.weight": np.ones(shape) for i, shape in enumerate(((128,), (32, 128), (128, 32)))}
"""Tensors of the first block that files have and nothing reads."""


def _options(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {"keys": keys, "optional": name not in PLAIN} | ({"tensors": _FIRST} if "arwkv" in name else {})


VARIANTS = {
    name: (write_architecture, {"architecture": architecture, **_options(name, keys)}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

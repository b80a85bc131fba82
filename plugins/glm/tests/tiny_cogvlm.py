"""Tiny models of CogVLM."""

from typing import Any

import numpy as np

from llamacli.testing import write_architecture
from llamacli_glm.cogvlm import CogVlm

_SHAPES = {
    "vis_attn_qkv": (192, 64), "vis_attn_output": (64, 64), "vis_gate": (96, 64), "vis_up": (96, 64),
    "vis_down": (64, 96),
}  # fmt: skip

PICTURES = {
    f"blk.{i}.{name}.weight": np.full(shape, 0.1, np.float32) for i in range(2) for name, shape in _SHAPES.items()
}
"""Matrices of pictures, which llama.cpp demands."""

_OPTIONS: dict[str, Any] = {
    "architecture": CogVlm(), "keys": {"attention.head_count_kv": 4}, "tensors": PICTURES,
}  # fmt: skip

VARIANTS = {
    "cogvlm": (write_architecture, _OPTIONS, 1e-9),
    "cogvlm_tied": (write_architecture, _OPTIONS | {"optional": False}, 1e-9),
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

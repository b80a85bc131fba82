"""Tiny media encoders: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_mmproj
from llamacli_qwen.sound import Qwen3Sound
from llamacli_qwen.vision import Qwen2Vision, Qwen3Vision, Qwen25Vision

_NO_SCALE = {"projector.scale_factor": None}
_NO_BIAS = ["v.patch_embd.bias"]

MEDIA = {
    "qwen2vl": (
        write_mmproj,
        {
            "architecture": Qwen2Vision(),
            "keys": {"feed_forward_length": 192} | _NO_SCALE,
            "gelu": False,
            "without": _NO_BIAS,
        },
        2e-7,
    ),
    "qwen2.5vl": (
        write_mmproj,
        {
            "architecture": Qwen25Vision(),
            "keys": {"n_wa_pattern": 2, "block_count": 3, "patch_size": 28, "image_size": 56} | _NO_SCALE,
            "gelu": False,
            "silu": True,
            "without": _NO_BIAS,
        },
        2e-7,
    ),
    "qwen3vl": (
        write_mmproj,
        {
            "architecture": Qwen3Vision(),
            "keys": {"spatial_merge_size": 2, "is_deepstack_layers": [True, False, True], "block_count": 3} | _NO_SCALE,
            "fused": True,
        },
        2e-7,
    ),
    "qwen3a": (  # llama.cpp divides sound in another way: docs/audio.md
        write_mmproj,
        {"architecture": Qwen3Sound(), "fields": {"n_channels": 16}, "without": ["a.conv_out.bias"]},
        None,
    ),
}
INERT = ["qwen3a:*.attn_k.bias"]
"""Biases of keys, which cancel out in softmax where there is no RoPE."""

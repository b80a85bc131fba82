"""Tiny media encoders: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_mmproj
from llamacli_gemma.siglip import Gemma3Vision
from llamacli_gemma.unified import Gemma4Unified
from llamacli_gemma.vision import Gemma4Vision

KEYS = {
    "patch_size": 4, "image_size": 200, "projector.scale_factor": 2, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
}  # fmt: skip
"""Keys of Gemma 4's encoder."""

MEDIA = {
    "gemma3": (write_mmproj, {"architecture": Gemma3Vision()}, 2e-7),
    "gemma4v": (
        write_mmproj,
        {
            "architecture": Gemma4Vision(),
            "keys": KEYS,
            "gelu": False,
            "silu": True,
            "without": ["v.std_bias", "v.std_scale", "v.patch_embd.bias"],
        },
        5e-6,
    ),
}
MEDIA |= {
    "gemma4uv": (
        write_mmproj,
        {
            "architecture": Gemma4Unified(),
            "keys": KEYS | {"block_count": 0, "attention.head_count": 0, "feed_forward_length": 0},
            "convolution": False,
        },
        2e-7,
    ),
}
INERT = ["gemma3:*.attn_k.bias"]
"""Biases of keys, which cancel out in softmax where there is no RoPE."""

"""Tiny media encoder: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_mmproj
from llamacli_lfm.vision import Lfm2Vision

MEDIA = {
    "lfm2": (write_mmproj, {"architecture": Lfm2Vision(), "keys": {"patch_size": 16, "image_size": 64}}, 2e-7),
}
INERT = ["lfm2:*.attn_k.bias"]
"""Biases of keys, which cancel out in softmax without RoPE."""

"""Tiny media encoders: writer, options, bound of the NMSE against llama.cpp."""

from llamacli.testing import write_mmproj
from llamacli_llama.idefics3 import Idefics3
from llamacli_llama.internvl import InternVl
from llamacli_llama.llava import Llava
from llamacli_llama.pixtral import Pixtral
from llamacli_llama.voxtral import Voxtral

_NO_SCALE = {"projector.scale_factor": None}
_NORMS = [f"v.blk.{i}.attn_{name}_norm.weight" for i in range(2) for name in "qk"]

MEDIA = {
    "idefics3": (write_mmproj, {"architecture": Idefics3(), "keys": {"preproc_image_size": 96}}, 2e-7),
    "internvl": (write_mmproj, {"architecture": InternVl(), "keys": {"preproc_max_tiles": 4}, "without": _NORMS}, 2e-7),
    "llava": (
        write_mmproj,
        {
            "architecture": Llava(),
            "keys": {"image_grid_pinpoints": [32, 64, 64, 32, 64, 64]} | _NO_SCALE,
            "gelu": False,
            "without": [f"mm.{i}.{kind}" for i in (1, 3, 4) for kind in ("weight", "bias")],
        },
        2e-7,
    ),
    "pixtral": (
        write_mmproj,
        {"architecture": Pixtral(), "keys": {"spatial_merge_size": 2} | _NO_SCALE, "gelu": False, "silu": True},
        2e-7,
    ),
    "voxtral": (  # llama.cpp computes something else: docs/audio.md
        write_mmproj,
        {
            "architecture": Voxtral(),
            "keys": {"projector.stack_factor": 4, "block_count": 1},
            "without": ["a.blk.0.attn_k.bias"],
        },
        None,
    ),
}
INERT = ["idefics3:*.attn_k.bias", "internvl:*.attn_k.bias", "llava:*.attn_k.bias"]
"""Biases of keys, which cancel out in softmax where there is no RoPE."""

"""Record llama.cpp's logits with RoPE options and overridden metadata: `python -m oracle.overrides`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tiny_variants
from oracle.goldens import DIRECTORY, N_CTX, POSITIONS, TOKENS, sha256

PATH = DIRECTORY / "overrides.npz"

YARN = {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}

CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "linear": (
        "gqa", {"rope_scaling_type": 1, "rope_freq_scale": 0.25}, ["--rope-scaling", "linear", "--rope-scale", "4"]
    ),
    "yarn": (
        "gqa", YARN, ["--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "64"]
    ),
    "betas": (
        "gqa", {**YARN, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        ["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "64", "--yarn-beta-fast", "16",
         "--yarn-beta-slow", "2"],
    ),
    "base": ("gqa", {"rope_freq_base": 500.0}, ["--rope-freq-base", "500"]),
    "experts": (
        "qwen3moe", {"kv_overrides": {"qwen3moe.expert_used_count": 4}},
        ["--override-kv", "{arch}.expert_used_count=int:4"],
    ),
}  # fmt: skip
"""Tiny model, keyword arguments of `llama_cpp.Llama`, and options of the command line."""


def main() -> None:
    """Record all cases."""
    from llama_cpp import Llama

    arrays = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, (variant, options, _) in CASES.items():
            path = tiny_variants.write(Path(temporary) / f"{name}.gguf", variant)
            f32 = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 1}
            peer = Llama(str(path), n_ctx=N_CTX, logits_all=True, verbose=False, **f32, **options)
            peer.eval(TOKENS.tolist())
            arrays[name] = np.array(peer.scores[: len(TOKENS)])[POSITIONS]
            arrays[f"{name} sha256"] = np.array(sha256(path))
            print(name, float(np.abs(arrays[name]).max()))
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()

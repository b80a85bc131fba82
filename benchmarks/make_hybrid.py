#!/usr/bin/env python3
"""Write a GGUF file with a real hybrid's or mixture's sizes.

    python benchmarks/make_hybrid.py qwen35-0.8b Q8_0 model.gguf

The weights are random, written by the tiny models' functions of the plugins' tests; there is no vocabulary. Models that
would be too large have fewer layers or experts.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).parents[1] / "plugins"

SHAPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen35-0.8b": (
        "qwen", "tiny_qwen_hybrid", "write_qwen_hybrid",
        {"n_layer": 24, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "head_dim": 256, "n_rot": 64, "n_ff": 3584,
         "n_head_k": 16, "n_head_v": 16, "state": 128, "interval": 4, "tied": True, "tokenizer": "test:248320"},
    ),
    "granitehybrid-micro": (  # 10 of 40 layers
        "granite", "tiny_granite", "write_granite",
        {"architecture": "granitehybrid", "n_layer": 10, "recurrent": (0, 1, 2, 3, 4, 6, 7, 8, 9), "n_embd": 2048,
         "n_head": 32, "n_head_kv": 8, "n_ff": 8192, "n_head_state": 64, "n_group": 1, "d_state": 128, "tied": True,
         "tokenizer": "test:100352"},
    ),
    "deepseek2-lite": (  # 16 of 64 experts; all layers, for llama.cpp knows the Lite models by their number
        "deepseek", "tiny_deepseek2", "write_deepseek2",
        {"n_layer": 27, "n_embd": 2048, "n_head": 16, "rank_q": 0, "rank_kv": 512, "nope_dim": 128, "rope_dim": 64,
         "value_dim": 128, "n_ff": 10944, "n_ff_expert": 1408, "n_shared": 2, "n_expert": 16, "n_expert_used": 6,
         "scoring": None, "biased": False, "tokenizer": "test:102400"},
    ),
    "glm4moe": (  # GLM-4.5-Air, 2 of 46 layers
        "glm", "tiny_glm", "write_glm",
        {"architecture": "glm4moe", "n_layer": 2, "n_embd": 4096, "n_head": 96, "n_head_kv": 8, "head_dim": 128,
         "n_ff": 10944, "n_ff_expert": 1408, "n_dense": 1, "qk_norm": False,
         "n_shared": 1, "n_expert": 128, "n_used": 8,
         "tokenizer": "test:151552"},
    ),
    "lfm2-1.2b": (
        "lfm", "tiny_lfm", "write_lfm",
        {"heads_kv": tuple(8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)), "n_embd": 2048, "n_head": 32,
         "n_ff": 8192, "tokenizer": "test:65536"},
    ),
}  # fmt: skip
"""Plugin, module and function that writes a model, and its options."""


def write(name: str, tensor_type: str, out: Path) -> None:
    """Write a model."""
    plugin, module, function, options = SHAPES[name]
    sys.path.insert(0, str(PLUGINS / plugin / "tests"))
    getattr(importlib.import_module(module), function)(out, type=tensor_type, **options)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("type")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write(options.name, options.type, options.out)


if __name__ == "__main__":
    main()

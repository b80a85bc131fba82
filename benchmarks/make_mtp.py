#!/usr/bin/env python3
"""Write a GGUF file whose prediction head is right or wrong.

    python benchmarks/make_mtp.py qwen35 right model.gguf
    python benchmarks/speculation.py model.gguf --draft mtp

Blocks cost their time and change nothing, so that the next token depends on the last one alone: the embedding is the
hidden state. The multi-token-prediction head that is right passes the embedding on; the other one passes its numbers on
in reversed order, and is as certain of another token. Weights are Q8_0.
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llamacli import conversion
from llamacli.gguf import open_gguf

PLUGINS = Path(__file__).parents[1] / "plugins"
N_VOCAB, N_EMBD, N_FF, N_LAYER = 32_768, 1024, 4096, 12

SHAPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "glm4": (
        "glm", "tiny_glm", "write_glm",
        {"architecture": "glm4", "n_layer": N_LAYER, "n_nextn": 1, "n_head": 16, "n_head_kv": 4, "head_dim": 64},
    ),
    "qwen35": (
        "qwen", "tiny_qwen_hybrid", "write_qwen_hybrid",
        {"n_layer": N_LAYER + 1, "n_nextn": 1, "n_head": 8, "n_head_kv": 2, "head_dim": 128, "n_rot": 32, "n_head_k": 8,
         "n_head_v": 8, "state": 128, "interval": 4},
    ),
}  # fmt: skip
"""Plugin, module and function that writes a model, and its options; without and with recurrent states."""


def write(name: str, out: Path, *, right: bool) -> None:
    """Write a model."""
    plugin, module, function, options = SHAPES[name]
    sys.path.insert(0, str(PLUGINS / plugin / "tests"))
    random, identity = np.random.default_rng(1), np.eye(N_EMBD, dtype=np.float32)
    head = f"blk.{N_LAYER}.nextn."
    tensors = {
        "token_embd.weight": random.standard_normal((N_VOCAB, N_EMBD), np.float32),
        "output.weight": random.standard_normal((N_VOCAB, N_EMBD), np.float32),
        f"{head}eh_proj.weight": np.hstack([identity if right else identity[::-1], np.zeros_like(identity)]),
        "output_norm.weight": np.ones(N_EMBD, np.float32),
        **{f"{head}{norm}.weight": np.ones(N_EMBD, np.float32) for norm in ("enorm", "hnorm", "shared_head_norm")},
    }
    for i in range(N_LAYER + 1):
        tensors[f"blk.{i}.ffn_down.weight"] = np.zeros((N_EMBD, N_FF), np.float32)
        recurrent = name == "qwen35" and i < N_LAYER and (i + 1) % 4
        tensors[f"blk.{i}.{'ssm_out' if recurrent else 'attn_output'}.weight"] = np.zeros((N_EMBD, 1024), np.float32)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        path = getattr(importlib.import_module(module), function)(
            Path(folder) / "f32.gguf", tokenizer=f"test:{N_VOCAB}", n_embd=N_EMBD, n_ff=N_FF, tensors=tensors, **options
        )
        with open_gguf(path) as file:
            conversion.write(conversion.plan(file, conversion.file_type("Q8_0")), out, overwrite=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("head", choices=["right", "wrong"])
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write(options.shape, options.out, right=options.head == "right")


if __name__ == "__main__":
    main()

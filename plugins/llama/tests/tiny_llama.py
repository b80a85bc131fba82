"""Tiny models of the llama architecture, and variants for goldens."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.plugin import INTERLEAVED
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_llama(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "llama",
    type: str = "F32",  # noqa: A002 - GGUF's word
    dequantized: bool = False,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    head_dim: int | None = None,
    n_ff: int = 96,
    context_length: int = 256,
    tied: bool = False,
    biases: bool = False,
    rope_freqs: bool = False,
    n_expert: int = 0,
    n_expert_used: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a model of the llama architecture and return its path.

    `tokenizer` is as in `llamacli.testing.vocabularies.vocabulary`. `type` is the matrices' tensor type;
    K-quants need widths that are multiples of 256; `dequantized` stores the same numbers as float32. `head_dim` writes
    `key_length` and `value_length`. The rest is as in `write_model`.
    """
    n_vocab, n_head_kv = vocabulary_size(tokenizer), n_head_kv or n_head
    width = head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "llama.context_length": context_length,
        "llama.embedding_length": n_embd,
        "llama.block_count": n_layer,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width,
    }
    if head_dim is not None:
        keys |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    if n_expert:
        keys |= {"llama.expert_count": n_expert, "llama.expert_used_count": n_expert_used}

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    experts = (n_expert,) if n_expert else ()
    suffix = "_exps" if n_expert else ""
    for i in range(n_layer):
        matrices = {
            "attn_q": (n_head * width, n_embd),
            "attn_k": (n_head_kv * width, n_embd),
            "attn_v": (n_head_kv * width, n_embd),
            "attn_output": (n_embd, n_head * width),
            f"ffn_gate{suffix}": (*experts, n_ff, n_embd),
            f"ffn_up{suffix}": (*experts, n_ff, n_embd),
            f"ffn_down{suffix}": (*experts, n_embd, n_ff),
        }
        for name, shape in matrices.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            if biases:
                shapes[f"blk.{i}.{name}.bias"] = shape[:1]
        if n_expert:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (n_expert, n_embd)
        shapes[f"blk.{i}.attn_norm.weight"] = shapes[f"blk.{i}.ffn_norm.weight"] = (n_embd,)

    return write_model(
        path,
        "llama",
        keys,
        shapes,
        tokenizer=tokenizer,
        seed=seed,
        type=type,
        dequantized=dequantized,
        metadata=metadata,
        tensors=tensors,
        without=without,
    )


_SMALL_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "Q1_0")

LLAMA: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_head_kv": 2},
    "mqa": {"n_head_kv": 1},
    "tied": {"n_head_kv": 2, "tied": True},
    "biases": {"n_head_kv": 2, "biases": True},
    "rope_base": {"metadata": {"llama.rope.freq_base": 500000.0}},
    "rope_freqs": {"rope_freqs": True},
    "rope_linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "rope_yarn": {
        "metadata": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        }
    },
    "head_dim": {"n_head_kv": 2, "head_dim": 32},
    "moe_8_2": {"n_head_kv": 2, "n_ff": 64, "n_expert": 8, "n_expert_used": 2},
    "moe_4_1": {"n_head_kv": 2, "n_ff": 64, "n_expert": 4, "n_expert_used": 1},
    "scales": {
        "n_head_kv": 2,
        "biases": True,
        "tensors": {
            f"blk.{i}.{name}.scale": np.array([0.5 + 0.1 * n + 0.3 * i])
            for i in range(2)
            for n, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
        },
    },
    "nvfp4": {
        "n_head_kv": 2,
        "n_ff": 128,
        "type": "NVFP4",
        "tensors": {
            f"blk.{i}.{name}.scale": np.array([1.0 + 0.1 * n])
            for i in range(2)
            for n, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))
        },
    },
    "f16": {"n_head_kv": 2, "type": "F16"},
    "bf16": {"n_head_kv": 2, "type": "BF16"},
    "q8_0": {"n_head_kv": 2, "type": "Q8_0"},
    "q4_0": {"n_head_kv": 2, "type": "Q4_0"},
    "q4_1": {"n_head_kv": 2, "type": "Q4_1"},
    "q5_0": {"n_head_kv": 2, "type": "Q5_0"},
    "q5_1": {"n_head_kv": 2, "type": "Q5_1"},
    "moe_q8_0": {"n_head_kv": 2, "n_ff": 64, "n_expert": 8, "n_expert_used": 2, "type": "Q8_0"},
    **{
        kind.lower(): {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": kind}
        for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", *_SMALL_TYPES)
    },
    **{
        f"moe_{kind.lower()}": {"n_embd": 256, "n_ff": 256, "n_expert": 4, "n_expert_used": 2, "type": kind}
        for kind in ("IQ1_M", "IQ2_XS")
    },
    "moe_nvfp4": {"n_head_kv": 2, "n_ff": 64, "n_expert": 8, "n_expert_used": 2, "type": "NVFP4"},
    "mxfp4": {"n_head_kv": 2, "type": "MXFP4"},
}
"""Options of `write_llama` by the variant's name. All share one seed, so variants differ by what they are named for."""

VARIANTS = {name: (write_llama, options, 1e-8) for name, options in LLAMA.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "llama": [
        HuggingFaceModel("llama", convert=INTERLEAVED),
        HuggingFaceModel("mixtral", {"num_local_experts": 6}, convert=INTERLEAVED),
    ]
}
"""Models of transformers by architecture."""

"""Tiny models of the apertus architecture."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_apertus(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "apertus",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    biases: tuple[str, ...] = (),
    fused: bool = False,
    rope_freqs: bool = False,
    longrope: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the architecture; return its path.

    `biases` are the matrices that have one, `longrope` writes factors for contexts up to 32 tokens and beyond. The
    rest is as in `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": width,
        "rope.freq_base": 12000000.0,
    }
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    content = dict(tensors or {})
    if longrope:
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32}
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, width // 2),
            "rope_factors_short.weight": np.linspace(1, 2, width // 2),
        } | content
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    n_q, n_kv = n_head * width, n_head_kv * width
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "attn_q_norm": (width,),
        "attn_k_norm": (width,),
        "attn_output": (n_embd, n_q),
        "ffn_norm": (n_embd,),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    if fused:
        block["attn_qkv"] = (n_q + 2 * n_kv, n_embd)
    else:
        block |= {"attn_q": (n_q, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        shapes |= {f"blk.{i}.{name}.bias": block[name][:1] for name in biases}
    prefixed = {f"apertus.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": seed, "metadata": xielu(n_layer) | (metadata or {}), "tensors": content}
    return write_model(path, "apertus", prefixed, shapes, **common, **rest)


def xielu(n_layer: int) -> dict[str, list[float]]:
    """Keys of xIELU, different in each layer."""
    return {
        "xielu.alpha_n": [0.8 + 0.3 * i for i in range(n_layer)],
        "xielu.alpha_p": [0.4 - 0.5 * i for i in range(n_layer)],
        "xielu.beta": [0.5 + 0.1 * i for i in range(n_layer)],
        "xielu.eps": [-1e-6] * n_layer,
    }


_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}

APERTUS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_freqs": True},
    "apertus_mqa": {"n_head_kv": 1},
    "apertus_biases": {"biases": ("attn_q", "attn_k", "attn_v", "attn_output")},
    "apertus_fused": {"fused": True},
    "apertus_head_dim": {"head_dim": 32},
    "apertus_one_xielu": {
        "metadata": {"xielu.alpha_n": -1.5, "xielu.alpha_p": 1.2, "xielu.beta": 0.3, "xielu.eps": -0.01}
    },
    "apertus_yarn": {"metadata": {f"apertus.{key}": value for key, value in _YARN.items()}},
    "apertus_longrope": {"longrope": True},
    "apertus_q8_0": {"type": "Q8_0"},
    "apertus_q4_k": {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}
"""Options of `write_apertus` by the variant's name."""

VARIANTS = {name: (write_apertus, options, 1e-8) for name, options in APERTUS.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

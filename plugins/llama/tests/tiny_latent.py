"""Tiny models with latent attention: minicpm3 and plm."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_latent(
    path: str | Path,
    *,
    architecture: str,
    tokenizer: str = "test",
    seed: str | None = None,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    nope_dim: int = 16,
    rope_dim: int = 8,
    value_dim: int | None = None,
    rank_q: int = 32,
    rank_kv: int = 48,
    n_ff: int = 96,
    untied: bool = False,
    longrope: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `rank_q`, the width of compressed queries, is minicpm3's only; without `value_dim`, files do not say how wide values
    are, which is `n_embd` / `n_head` then; `longrope` writes factors for contexts up to 32
    tokens and beyond. The rest is as in `write_model`.
    """
    n_vocab, head_dim, compressed = vocabulary_size(tokenizer), nope_dim + rope_dim, architecture == "minicpm3"
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": head_dim,
        "attention.kv_lora_rank": rank_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": rope_dim,
    }
    if value_dim:
        keys["attention.value_length"] = value_dim
    n_v = value_dim or n_embd // n_head
    content = dict(tensors or {})
    if longrope:
        keys |= {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19}
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, rope_dim // 2),
            "rope_factors_short.weight": np.linspace(1, 2, rope_dim // 2),
        } | content
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if untied:
        shapes["output.weight"] = (n_vocab, n_embd)
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "attn_kv_a_mqa": (rank_kv + rope_dim, n_embd),
        "attn_kv_a_norm": (rank_kv,),
        "attn_kv_b": (n_head * (nope_dim + n_v), rank_kv),
        "attn_output": (n_embd, n_head * n_v),
        "ffn_norm": (n_embd,),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    if compressed:
        keys["attention.q_lora_rank"] = rank_q
        block |= {"attn_q_a": (rank_q, n_embd), "attn_q_a_norm": (rank_q,), "attn_q_b": (n_head * head_dim, rank_q)}
        block["ffn_gate"] = (n_ff, n_embd)
    else:
        block["attn_q"] = (n_head * head_dim, n_embd)
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": seed or architecture, "metadata": metadata, "tensors": content}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_WIDE = {"n_embd": 256, "n_ff": 256, "rank_kv": 256, "value_dim": 64, "type": "Q4_K"}

LATENT: dict[str, dict[str, dict[str, Any]]] = {
    "minicpm3": {
        "": {"untied": True},
        "tied": {"nope_dim": 8, "rope_dim": 16, "value_dim": 32},
        "longrope": {"untied": True, "longrope": True},
        "q8_0": {"untied": True, "rank_kv": 64, "type": "Q8_0"},
        "q4_k": {"untied": True, "rank_q": 256} | _WIDE,
    },
    "plm": {
        "": {},
        "wide_values": {"value_dim": 48},
        "q8_0": {"rank_kv": 64, "type": "Q8_0"},
        "q4_k": _WIDE,
    },
}
"""Options of `write_latent` by architecture and variant."""

VARIANTS = {
    "_".join(filter(None, (architecture, name))): (write_latent, {"architecture": architecture} | options, 1e-8)
    for architecture, variants in LATENT.items()
    for name, options in variants.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

"""Tiny models of the Phi family: phi3."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_phi(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    n_rot: int | None = None,
    context_length: int = 256,
    original: int = 256,
    factors: bool = False,
    tied: bool = False,
    biases: bool = False,
    fused: bool = True,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the phi3 architecture and return its path.

    `n_rot` dimensions of each head are rotated, `original` is the context that the model had before it was stretched,
    with `factors` those of LongRoPE for both sides of it. `fused` stores queries, keys and values as one matrix, as
    converters do. The rest is as in `write_model`.
    """
    n_vocab, n_head_kv, width = vocabulary_size(tokenizer), n_head_kv or n_head, n_embd // n_head
    n_rot = n_rot or width
    keys: dict[str, Any] = {
        "context_length": context_length,
        "rope.scaling.original_context_length": original,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 0,
        "rope.dimension_count": n_rot,
        "rope.freq_base": 10000.0,
    }
    content = dict(tensors or {})
    if factors:
        keys["rope.scaling.attn_factor"] = 1.19
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, n_rot // 2),
            "rope_factors_short.weight": np.linspace(1, 2, n_rot // 2),
        } | content

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    n_kv = n_head_kv * width
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        for name, n_out in projections.items():
            shapes[f"blk.{i}.{name}.weight"] = (n_out, n_embd)
            if biases:
                shapes[f"blk.{i}.{name}.bias"] = (n_out,)
        shapes[f"blk.{i}.attn_output.weight"] = (n_embd, n_embd)
        shapes[f"blk.{i}.ffn_up.weight"] = (2 * n_ff, n_embd)
        shapes[f"blk.{i}.ffn_down.weight"] = (n_embd, n_ff)
        shapes[f"blk.{i}.attn_norm.weight"] = shapes[f"blk.{i}.ffn_norm.weight"] = (n_embd,)

    prefixed = {f"phi3.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": "phi", "metadata": metadata, "tensors": content}
    return write_model(path, "phi3", prefixed, shapes, **common, **rest)


_BEYOND = {"factors": True, "original": 32}
_WITHIN = {"factors": True, "context_length": 1024}

PHI: dict[str, dict[str, Any]] = {
    "phi3_mha": {},
    "phi3_gqa": {"n_head_kv": 2},
    "phi3_mqa": {"n_head_kv": 1},
    "phi3_tied": {"n_head_kv": 2, "tied": True},
    "phi3_biases": {"n_head_kv": 2, "biases": True},
    "phi3_apart": {"n_head_kv": 2, "fused": False},
    "phi3_apart_biases": {"n_head_kv": 2, "fused": False, "biases": True},
    "phi3_long": {"n_head_kv": 2} | _BEYOND,
    "phi3_short": {"n_head_kv": 2} | _WITHIN,
    "phi3_partial": {"n_head_kv": 2, "n_rot": 12},
    "phi3_partial_long": {"n_head_kv": 2, "n_rot": 12, "tied": True} | _BEYOND,
    "phi3_partial_short": {"n_head_kv": 2, "n_rot": 12, "tied": True} | _WITHIN,
    "phi3_q8_0": {"n_head_kv": 2, "type": "Q8_0"} | _BEYOND,
    "phi3_q4_k": {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": "Q4_K"} | _BEYOND,
}
"""Options of `write_phi` by the variant's name. `phi3_long` and `phi3_short` are run in a context of 256 tokens, which
is beyond the original one and within it."""

VARIANTS = {name: (write_phi, options, 1e-8) for name, options in PHI.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {"phi3": [HuggingFaceModel("phi3")]}
"""Models of transformers by architecture."""

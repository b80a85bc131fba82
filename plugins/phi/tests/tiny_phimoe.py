"""Tiny models of the phimoe architecture."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_phimoe(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "phimoe",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 64,
    n_expert: int = 8,
    n_expert_used: int = 2,
    original: int = 256,
    factors: bool = False,
    fused: bool = False,
    biases: bool = True,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the architecture; return its path.

    `original` is the context that the model had before it was stretched, with `factors` those of LongRoPE for both
    sides of it; `biases` are those of queries, keys and values. The rest is as in `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "rope.scaling.original_context_length": original,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 0,
        "rope.dimension_count": width,
        "rope.freq_base": 10000.0,
        "expert_count": n_expert,
        "expert_used_count": n_expert_used,
    }
    content = dict(tensors or {})
    if factors:
        keys["rope.scaling.attn_factor"] = 1.19
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, width // 2),
            "rope_factors_short.weight": np.linspace(1, 2, width // 2),
        } | content
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    linears = {"output": (n_vocab, n_embd)}
    n_kv = n_head_kv * width
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        linears[f"blk.{i}.attn_output"] = (n_embd, n_embd)
        for name, n_out in projections.items():
            shapes[f"blk.{i}.{name}.weight"] = (n_out, n_embd)
            if biases:
                shapes[f"blk.{i}.{name}.bias"] = (n_out,)
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = (n_expert, n_embd)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            shapes[f"blk.{i}.{name}.weight"] = (n_expert, n_ff, n_embd)
        shapes[f"blk.{i}.ffn_down_exps.weight"] = (n_expert, n_embd, n_ff)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for norm in ("output_norm", *(f"blk.{i}.{name}_norm" for i in range(n_layer) for name in ("attn", "ffn"))):
        shapes |= {f"{norm}.weight": (n_embd,), f"{norm}.bias": (n_embd,)}
    prefixed = {f"phimoe.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": seed, "metadata": metadata, "tensors": content}
    return write_model(path, "phimoe", prefixed, shapes, **common, **rest)


PHIMOE: dict[str, dict[str, Any]] = {
    "phimoe": {},
    "phimoe_mqa": {"n_head_kv": 1},
    "phimoe_fused": {"fused": True},
    "phimoe_no_biases": {"biases": False},
    "phimoe_long": {"factors": True, "original": 32},
    "phimoe_short": {"factors": True},
    "phimoe_top_1": {"n_expert": 4, "n_expert_used": 1},
    "phimoe_q8_0": {"type": "Q8_0"},
    "phimoe_q4_k": {"n_embd": 256, "n_ff": 256, "type": "Q4_K"},
}
"""Options of `write_phimoe` by the variant's name."""

VARIANTS = {name: (write_phimoe, options, 1e-8) for name, options in PHIMOE.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

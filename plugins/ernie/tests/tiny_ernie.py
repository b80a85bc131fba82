"""Tiny models of the ERNIE family: ernie4_5 and ernie4_5-moe."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_ernie(
    path: str | Path,
    *,
    architecture: str = "ernie4_5",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_dense: int = 1,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    n_ff_shared: int | None = 128,
    n_expert: int = 8,
    n_expert_used: int = 3,
    selection_bias: bool = True,
    tied: bool = False,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path."""
    n_vocab, width, moe = vocabulary_size(tokenizer), head_dim or n_embd // n_head, architecture.endswith("moe")
    n_q, n_kv = n_head * width, n_head_kv * width
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    if moe:
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": n_expert_used,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": n_dense,
            "expert_feed_forward_length": n_ff_expert,
            "expert_shared_feed_forward_length": n_ff_shared,
        }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        for name, n_out in projections.items():
            block[f"{name}.weight"] = (n_out, n_embd)
            if biases:
                block[f"{name}.bias"] = (n_out,)
        block["attn_output.weight"] = (n_embd, n_q)
        if moe and i >= n_dense:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            if selection_bias:
                block["exp_probs_b.bias"] = (n_expert,)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            if n_ff_shared:
                block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_ff_shared, n_embd)
                block["ffn_down_shexp.weight"] = (n_embd, n_ff_shared)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": architecture, "metadata": metadata}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_MOE = {"architecture": "ernie4_5-moe"}
_WIDE = {"n_embd": 256, "n_ff": 512, "n_ff_expert": 256, "n_ff_shared": 512, "type": "Q4_K"}

ERNIE: dict[str, dict[str, Any]] = {
    "ernie": {},
    "ernie_mqa": {"n_head_kv": 1, "tied": True},
    "ernie_head_dim": {"head_dim": 32, "n_head_kv": 4},
    "ernie_biases": {"biases": True},
    "ernie_fused": {"biases": True, "fused": True},
    "ernie_q8_0": {"type": "Q8_0"},
    "ernie_q4_k": _WIDE,
    "paddleocr": {
        "architecture": "paddleocr",
        "biases": True,
        "tied": True,
        "metadata": {"paddleocr.rope.dimension_sections": [2, 3, 3, 0]},
    },
    "ernie_moe": _MOE,
    "ernie_moe_no_bias": _MOE | {"selection_bias": False, "tied": True},
    "ernie_moe_not_shared": _MOE | {"n_ff_shared": None, "biases": True},
    "ernie_moe_all_blocks": _MOE | {"n_dense": 0, "fused": True, "n_expert_used": 1},
    "ernie_moe_q8_0": _MOE | {"type": "Q8_0"},
    "ernie_moe_q4_k": _MOE | _WIDE,
}
"""Options of `write_ernie` by the variant's name."""

VARIANTS = {name: (write_ernie, options, 1e-8) for name, options in ERNIE.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "ernie4_5": [HuggingFaceModel("ernie4_5")],
}
"""Models of transformers by architecture."""

"""Tiny models of the Hunyuan family: hunyuan-dense and hunyuan-moe."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_hunyuan(
    path: str | Path,
    *,
    architecture: str = "hunyuan-dense",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    n_ff_shared: int | None = None,
    n_expert: int = 8,
    n_expert_used: int = 2,
    tied: bool = False,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    Without `n_ff_shared` the file has no key for the width of the shared expert, which is then `n_ff`.
    """
    n_vocab, width = vocabulary_size(tokenizer), head_dim or n_embd // n_head
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
        "rope.freq_base": 11158840.0,
    }
    block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    for name, n_out in projections.items():
        block[f"{name}.weight"] = (n_out, n_embd)
        if biases:
            block[f"{name}.bias"] = (n_out,)
    block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (width,)
    block["attn_output.weight"] = (n_embd, n_q)
    if architecture == "hunyuan-moe":
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": n_expert_used,
            "expert_feed_forward_length": n_ff,
            "expert_shared_feed_forward_length": n_ff_shared,
        }
        n_shared = n_ff_shared or n_ff
        block["ffn_gate_inp.weight"] = (n_expert, n_embd)
        block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff, n_embd)
        block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff)
        block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_shared, n_embd)
        block["ffn_down_shexp.weight"] = (n_embd, n_shared)
    else:
        block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
        block["ffn_down.weight"] = (n_embd, n_ff)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    shapes |= {f"blk.{i}.{name}": shape for i in range(n_layer) for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": architecture, "metadata": metadata}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_MOE = {"architecture": "hunyuan-moe"}
_WIDE = {"n_embd": 256, "n_ff": 512, "type": "Q4_K"}

HUNYUAN: dict[str, dict[str, Any]] = {
    "hunyuan": {},
    "hunyuan_mqa": {"n_head_kv": 1, "tied": True},
    "hunyuan_head_dim": {"n_head_kv": 4, "head_dim": 32},
    "hunyuan_biases": {"biases": True},
    "hunyuan_fused": {"fused": True, "biases": True},
    "hunyuan_alpha": {"metadata": {"hunyuan-dense.rope.scaling.alpha": 1000.0, "hunyuan-dense.rope.freq_base": 100.0}},
    "hunyuan_one_expert": {"metadata": {"hunyuan-dense.expert_count": 1}},
    "hunyuan_q8_0": {"type": "Q8_0"},
    "hunyuan_q4_k": _WIDE,
    "hunyuan_vl": {
        "architecture": "hunyuan_vl",
        "metadata": {
            "hunyuan_vl.rope.dimension_sections": [2, 3, 3, 0],
            "hunyuan_vl.rope.scaling.alpha": 1000.0,
            "hunyuan_vl.rope.freq_base": 100.0,
        },
    },
    "hunyuan_vl_plain": {"architecture": "hunyuan_vl", "biases": True},
    "hunyuan_moe": _MOE | {"n_ff_shared": 160},
    "hunyuan_moe_tied": _MOE | {"tied": True, "head_dim": 32, "n_expert_used": 3},
    "hunyuan_moe_fused": _MOE | {"fused": True, "biases": True},
    "hunyuan_moe_q8_0": _MOE | {"n_ff_shared": 160, "type": "Q8_0"},
    "hunyuan_moe_q4_k": _MOE | _WIDE,
}
"""Options of `write_hunyuan` by the variant's name."""

VARIANTS = {name: (write_hunyuan, options, 1e-8) for name, options in HUNYUAN.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "hunyuan-moe": [
        HuggingFaceModel(
            "hunyuan_v1_moe",
            {"num_experts": 8, "num_experts_per_tok": 2},
            keys={
                "expert_count": 8,
                "expert_used_count": 2,
                "expert_feed_forward_length": lambda config: config.intermediate_size,
                "expert_shared_feed_forward_length": lambda config: config.intermediate_size,
            },
        )
    ],
    "hunyuan-dense": [HuggingFaceModel("hunyuan_v1_dense")],
}
"""Models of transformers by architecture."""

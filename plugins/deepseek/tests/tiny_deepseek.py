"""Tiny models of the DeepSeek family: deepseek."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_deepseek(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_dense: int = 1,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 4,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    n_shared: int = 2,
    n_expert: int = 8,
    n_expert_used: int = 3,
    weight_scale: float | None = 1.0,
    tied: bool = False,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, width, n_ff_shared = vocabulary_size(tokenizer), n_embd // n_head, n_shared * n_ff_expert
    n_q, n_kv = n_head * width, n_head_kv * width
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "leading_dense_block_count": n_dense,
        "expert_count": n_expert,
        "expert_used_count": n_expert_used,
        "expert_shared_count": n_shared,
        "expert_feed_forward_length": n_ff_expert,
        "expert_weights_scale": weight_scale,
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
        if i >= n_dense:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_ff_shared, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_ff_shared)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"deepseek.{key}": value for key, value in keys.items()}
    return write_model(
        path, "deepseek", prefixed, shapes, tokenizer=tokenizer, seed="deepseek", metadata=metadata, **rest
    )


DEEPSEEK: dict[str, dict[str, Any]] = {
    "deepseek": {},
    "deepseek_gqa": {"n_head_kv": 2, "tied": True},
    "deepseek_scaled": {"weight_scale": 2.5, "n_head_kv": 1},
    "deepseek_unscaled": {"weight_scale": 0.0, "n_dense": 0},
    "deepseek_biases": {"biases": True, "n_shared": 1, "weight_scale": None},
    "deepseek_fused": {"biases": True, "fused": True, "n_expert_used": 1},
    "deepseek_q8_0": {"type": "Q8_0"},
    "deepseek_q4_k": {"n_embd": 256, "n_ff": 512, "n_ff_expert": 256, "weight_scale": 2.5, "type": "Q4_K"},
}
"""Options of `write_deepseek` by the variant's name."""

VARIANTS = {name: (write_deepseek, options, 1e-8) for name, options in DEEPSEEK.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

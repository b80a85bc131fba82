"""Tiny models of DeepSeek-V2 and V3: deepseek2."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_deepseek2(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_dense: int = 1,
    n_nextn: int = 0,
    n_embd: int = 64,
    n_head: int = 4,
    rank_q: int = 24,
    rank_kv: int = 32,
    nope_dim: int = 16,
    rope_dim: int = 8,
    value_dim: int = 12,
    absorbed: bool = True,
    n_ff: int = 96,
    n_ff_expert: int = 32,
    n_shared: int = 1,
    n_expert: int = 8,
    n_expert_used: int = 3,
    scoring: int | None = 2,
    groups: tuple[int, int] | None = None,
    biased: bool = True,
    fused: bool = False,
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, key_dim = vocabulary_size(tokenizer), nope_dim + rope_dim
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer + n_nextn,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1 if absorbed else n_head,
        "attention.key_length": rank_kv + rope_dim if absorbed else key_dim,
        "attention.value_length": rank_kv if absorbed else value_dim,
        "attention.q_lora_rank": rank_q or None,
        "attention.kv_lora_rank": rank_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": rope_dim,
        "leading_dense_block_count": n_dense,
        "expert_count": n_expert,
        "expert_used_count": n_expert_used,
        "expert_shared_count": n_shared,
        "expert_feed_forward_length": n_ff_expert,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": scoring,
    }
    if absorbed:
        keys |= {"attention.key_length_mla": key_dim, "attention.value_length_mla": value_dim}
    if groups:
        keys |= {"expert_group_count": groups[0], "expert_group_used_count": groups[1]}
    if n_nextn:
        keys["nextn_predict_layers"] = n_nextn
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    for i in range(n_layer + n_nextn):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        if rank_q:
            block["attn_q_a.weight"], block["attn_q_a_norm.weight"] = (rank_q, n_embd), (rank_q,)
            block["attn_q_b.weight"] = (n_head * key_dim, rank_q)
        else:
            block["attn_q.weight"] = (n_head * key_dim, n_embd)
        block["attn_kv_a_mqa.weight"], block["attn_kv_a_norm.weight"] = (rank_kv + rope_dim, n_embd), (rank_kv,)
        if absorbed:
            block["attn_k_b.weight"] = (n_head, rank_kv, nope_dim)
            block["attn_v_b.weight"] = (n_head, value_dim, rank_kv)
        else:
            block["attn_kv_b.weight"] = (n_head * (nope_dim + value_dim), rank_kv)
        block["attn_output.weight"] = (n_embd, n_head * value_dim)
        if i < n_dense:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        else:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            if biased:
                block["exp_probs_b.bias"] = (n_expert,)
            if fused:
                block["ffn_gate_up_exps.weight"] = (n_expert, 2 * n_ff_expert, n_embd)
            else:
                block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_shared * n_ff_expert, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_shared * n_ff_expert)
        if i >= n_layer:
            block["nextn.eh_proj.weight"] = (n_embd, 2 * n_embd)
            block |= {f"nextn.{name}.weight": (n_embd,) for name in ("enorm", "hnorm", "shared_head_norm")}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"deepseek2.{key}": value for key, value in keys.items()}
    return write_model(
        path, "deepseek2", prefixed, shapes, tokenizer=tokenizer, seed="deepseek2", metadata=metadata, **rest
    )


YARN = {
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 8.0,
    "deepseek2.rope.scaling.original_context_length": 32,
}
Q8 = {"n_embd": 64, "rank_q": 32, "nope_dim": 32, "value_dim": 32, "rope_dim": 16, "n_ff_expert": 64, "type": "Q8_0"}
Q4_K = {
    "n_embd": 256, "n_head": 2, "rank_q": 256, "rank_kv": 256, "nope_dim": 256, "rope_dim": 64, "value_dim": 256,
    "n_ff": 256, "n_ff_expert": 256, "n_expert": 4, "n_expert_used": 4, "type": "Q4_K",
}  # fmt: skip

DEEPSEEK2: dict[str, dict[str, Any]] = {
    "deepseek2": {},
    "deepseek2_lite": {"rank_q": 0, "n_layer": 26, "scoring": None, "biased": False, "n_ff": 32, "n_expert": 4},
    "deepseek2_groups": {"groups": (4, 2), "n_expert": 16, "n_expert_used": 4, "n_shared": 2, "tied": True},
    "deepseek2_legacy": {"absorbed": False, "value_dim": 24},
    "deepseek2_legacy_yarn": {
        "absorbed": False,
        "n_dense": 0,
        "metadata": YARN | {"deepseek2.rope.scaling.yarn_log_multiplier": 0.0707},
    },
    "deepseek2_yarn": {"metadata": YARN},
    "deepseek2_yarn_multiplier": {"metadata": YARN | {"deepseek2.rope.scaling.yarn_log_multiplier": 0.1}},
    "deepseek2_linear": {
        "metadata": {
            "deepseek2.rope.scaling.factor": 4.0, "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
            "deepseek2.rope.scaling.attn_factor": 1.25,
        }
    },
    "deepseek2_temperature": {
        "metadata": {"deepseek2.attention.temperature_scale": 0.5, "deepseek2.attention.temperature_length": 8}
    },
    "deepseek2_nextn": {"n_nextn": 1, "fused": True},
    "deepseek2_q8_0": Q8,
    "deepseek2_q4_k": Q4_K,
}  # fmt: skip
"""Options of `write_deepseek2` by the variant's name."""

VARIANTS = {name: (write_deepseek2, options, 1e-8) for name, options in DEEPSEEK2.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

INERT = ("deepseek2_q4_k:*.exp_probs_b.bias",)
"""Selection biases of a variant whose router takes all experts."""

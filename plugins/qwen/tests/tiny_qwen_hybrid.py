"""Tiny models of the Qwen hybrids: gated delta nets and attention."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_qwen_hybrid(
    path: str | Path,
    *,
    architecture: str = "qwen35",
    tokenizer: str = "test",
    n_layer: int = 4,
    n_nextn: int = 0,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_rot: int = 16,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    n_ff_shared: int = 96,
    n_expert: int = 6,
    n_expert_used: int = 2,
    n_head_k: int = 2,
    n_head_v: int = 4,
    state: int = 16,
    taps: int = 4,
    interval: int | None = 2,
    tied: bool = False,
    fused: bool = False,
    legacy: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    Every `interval`-th layer has attention, over heads of which `n_rot` numbers are rotated. A gated delta net has
    `n_head_k` heads of queries and keys and `n_head_v` of values, `state` wide. `fused` stores gates and ups of
    experts as one, `legacy` all inputs of delta nets but the step size and decay. `n_nextn` of the layers are
    multi-token prediction blocks. The rest is as in `write_model`.
    """
    moe = architecture != "qwen35"
    n_vocab, n_k, n_v = vocabulary_size(tokenizer), n_head_k * state, n_head_v * state
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": n_rot,
        "ssm.conv_kernel": taps,
        "ssm.inner_size": n_v,
        "ssm.state_size": state,
        "ssm.time_step_rank": n_head_v,
        "ssm.group_count": n_head_k,
        "full_attention_interval": interval,
        "nextn_predict_layers": n_nextn or None,
    }
    if architecture != "qwen3next":
        keys["rope.dimension_sections"] = [n_rot // 2 - 2 * (n_rot // 6), n_rot // 6, n_rot // 6, 0]
    if moe:
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": n_expert_used,
            "expert_feed_forward_length": n_ff_expert,
            "expert_shared_feed_forward_length": n_ff_shared,
        }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    for i in range(n_layer):
        is_nextn = i >= n_layer - n_nextn
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "post_attention_norm.weight": (n_embd,)}
        if is_nextn or (i + 1) % (interval or 4) == 0:
            block |= {
                "attn_q.weight": (2 * n_head * head_dim, n_embd),
                "attn_k.weight": (n_head_kv * head_dim, n_embd),
                "attn_v.weight": (n_head_kv * head_dim, n_embd),
                "attn_output.weight": (n_embd, n_head * head_dim),
                "attn_q_norm.weight": (head_dim,),
                "attn_k_norm.weight": (head_dim,),
            }
        else:
            block |= {
                "attn_qkv.weight": (2 * n_k + n_v, n_embd),
                "attn_gate.weight": (n_v, n_embd),
                "ssm_conv1d.weight": (2 * n_k + n_v, taps),
                "ssm_dt.bias": (n_head_v,),
                "ssm_a": (n_head_v,),
                "ssm_norm.weight": (state,),
                "ssm_out.weight": (n_embd, n_v),
            }
            if legacy:
                block["ssm_in.weight"] = (2 * n_k + 2 * n_v, n_embd)
                del block["attn_qkv.weight"], block["attn_gate.weight"]
            if architecture == "qwen3next":
                block["ssm_ba.weight"] = (2 * n_head_v, n_embd)
            else:
                block["ssm_beta.weight"] = block["ssm_alpha.weight"] = (n_head_v, n_embd)
        if moe:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            if fused:
                block["ffn_gate_up_exps.weight"] = (n_expert, 2 * n_ff_expert, n_embd)
            else:
                block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            block["ffn_gate_inp_shexp.weight"] = (n_embd,)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_ff_shared, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_ff_shared)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        if is_nextn:
            block["nextn.eh_proj.weight"] = (n_embd, 2 * n_embd)
            block["nextn.enorm.weight"] = block["nextn.hnorm.weight"] = (n_embd,)
            block["nextn.shared_head_norm.weight"] = (n_embd,)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


_MOE, _NEXT = {"architecture": "qwen35moe"}, {"architecture": "qwen3next"}
_WIDE = {"n_embd": 256, "n_head": 4, "head_dim": 64, "n_rot": 32, "state": 64, "n_ff": 512}
_WIDE_EXPERTS = {"n_ff_expert": 256, "n_ff_shared": 256, "n_expert": 4}
_NO_WIDTHS = {f"qwen35moe.expert_{key}feed_forward_length": None for key in ("", "shared_")}

QWEN_HYBRID: dict[str, dict[str, Any]] = {
    "qwen35": {},
    "qwen35_tied": {"tied": True, "n_head_k": 4},
    "qwen35_default_interval": {"n_layer": 5, "interval": None, "taps": 3},
    "qwen35_one_key_head": {"n_head_k": 1, "state": 48, "n_head_kv": 1},
    "qwen35_nextn": {"n_layer": 5, "n_nextn": 1},
    "qwen35moe_nextn": _MOE | {"n_layer": 3, "n_nextn": 1},
    "qwen3next_nextn": _NEXT | {"n_layer": 3, "n_nextn": 1},
    "qwen35_q8_0": {"type": "Q8_0"},
    "qwen35_q4_k": _WIDE | {"type": "Q4_K"},
    "qwen35moe": _MOE,
    "qwen35moe_fused": _MOE | {"fused": True, "tied": True},
    "qwen35moe_default_widths": _MOE | {"n_ff_expert": 48, "metadata": _NO_WIDTHS},
    "qwen35moe_q8_0": _MOE | {"type": "Q8_0", "n_layer": 2, "n_expert": 4, "n_expert_used": 4},
    "qwen35moe_q4_k": _MOE | _WIDE | _WIDE_EXPERTS | {"type": "Q4_K"},
    "qwen3next": _NEXT,
    "qwen3next_three_value_heads": _NEXT | {"n_head_k": 2, "n_head_v": 6, "tied": True},
    "qwen3next_legacy": _NEXT | {"legacy": True, "n_head_k": 2, "n_head_v": 6},
    "qwen3next_q8_0": _NEXT | {"type": "Q8_0", "n_layer": 2, "n_expert": 4, "n_expert_used": 4},
    "qwen3next_q4_k": _NEXT | _WIDE | _WIDE_EXPERTS | {"type": "Q4_K"},
}  # fmt: skip
"""Options of `write_qwen_hybrid` by the variant's name."""

VARIANTS = {name: (write_qwen_hybrid, options, 1e-8) for name, options in QWEN_HYBRID.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

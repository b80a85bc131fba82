"""Tiny models of the Bailing family: bailingmoe2."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_bailing(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_dense: int = 1,
    n_embd: int = 64,
    n_head: int = 4,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    n_ff_one_shared: int | None = None,
    n_head_kv: int = 2,
    n_nextn: int = 0,
    groups: tuple[int, int] | None = None,
    n_shared: int = 2,
    n_expert: int = 8,
    n_expert_used: int = 3,
    weight_scale: float | None = 2.5,
    scoring: int = 2,
    renormalize: bool | None = True,
    selection_bias: bool = True,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    n_ff_shared, n_qkv = n_shared * (n_ff_one_shared or n_ff_expert), (n_head + 2 * n_head_kv) * width
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer + n_nextn,
        "nextn_predict_layers": n_nextn or None,
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
        "expert_weights_norm": renormalize,
        "expert_gating_func": scoring,
        "expert_shared_feed_forward_length": n_ff_one_shared,
    }
    if groups:
        keys |= {"expert_group_count": groups[0], "expert_group_used_count": groups[1]}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    for i in range(n_layer + n_nextn):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        block["attn_qkv.weight"] = (n_qkv, n_embd)
        block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (width,)
        block["attn_output.weight"] = (n_embd, n_embd)
        if i >= n_dense:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            if selection_bias:
                block["exp_probs_b.bias"] = (n_expert,)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_ff_shared, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_ff_shared)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        if i >= n_layer:
            block["nextn.eh_proj.weight"] = (n_embd, 2 * n_embd)
            names = "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "layer_output_norm"
            block |= {f"{name}.weight": (n_embd,) for name in names}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"bailingmoe2.{key}": value for key, value in keys.items()}
    return write_model(
        path, "bailingmoe2", prefixed, shapes, tokenizer=tokenizer, seed="bailingmoe2", metadata=metadata, **rest
    )


BAILING: dict[str, dict[str, Any]] = {
    "bailing": {},
    "bailing_groups": {"groups": (4, 2), "n_expert": 16, "n_expert_used": 4},
    "bailing_no_dense": {"n_dense": 0, "n_shared": 1, "n_ff_one_shared": 32},
    "bailing_softmax": {"scoring": 1, "selection_bias": False, "renormalize": None, "weight_scale": 0.0},
    "bailing_partial_rotary": {"metadata": {"bailingmoe2.rope.dimension_count": 8}, "n_head_kv": 1},
    "bailing_nextn": {"n_nextn": 1},
    "bailing_q8_0": {"type": "Q8_0"},
    "bailing_q4_k": {"n_embd": 256, "n_ff": 512, "n_ff_expert": 256, "n_expert_used": 8, "type": "Q4_K"},
}
"""Options of `write_bailing` by the variant's name."""

VARIANTS = {name: (write_bailing, options, 1e-8) for name, options in BAILING.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

INERT = ("bailing_q4_k:*.exp_probs_b.bias",)
"""Selection biases of a variant whose router takes all experts."""

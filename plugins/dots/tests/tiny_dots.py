"""Tiny models of the dots family: dots1."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_dots(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_dense: int = 1,
    n_embd: int = 64,
    n_head: int = 4,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    head_dim: int | None = None,
    n_shared: int = 2,
    n_expert: int = 8,
    n_expert_used: int = 3,
    weight_scale: float | None = 2.5,
    scoring: int = 2,
    renormalize: bool | None = True,
    selection_bias: bool = True,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path.

    llama.cpp reads no files with fewer heads of keys than of queries.
    """
    n_vocab, width, n_ff_shared = vocabulary_size(tokenizer), head_dim or n_embd // n_head, n_shared * n_ff_expert
    n_q = n_head * width
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
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
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    projections = {"attn_qkv": 3 * n_q} if fused else dict.fromkeys(("attn_q", "attn_k", "attn_v"), n_q)
    for i in range(n_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        for name, n_out in projections.items():
            block[f"{name}.weight"] = (n_out, n_embd)
            if biases:
                block[f"{name}.bias"] = (n_out,)
        block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (width,)
        block["attn_output.weight"] = (n_embd, n_q)
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
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"dots1.{key}": value for key, value in keys.items()}
    return write_model(path, "dots1", prefixed, shapes, tokenizer=tokenizer, seed="dots1", metadata=metadata, **rest)


DOTS: dict[str, dict[str, Any]] = {
    "dots": {},
    "dots_head_dim": {"head_dim": 32},
    "dots_no_dense": {"n_dense": 0, "n_shared": 1},
    "dots_unscaled": {"weight_scale": 0.0, "n_expert_used": 1},
    "dots_not_renormalized": {"renormalize": None, "weight_scale": 0.5},
    "dots_softmax": {"scoring": 1, "selection_bias": False},
    "dots_softmax_of_chosen": {"scoring": 3, "renormalize": False},
    "dots_sqrt_softplus": {"scoring": 4},
    "dots_biases": {"biases": True},
    "dots_fused": {"biases": True, "fused": True},
    "dots_q8_0": {"type": "Q8_0"},
    "dots_q4_k": {"n_embd": 256, "n_ff": 512, "n_ff_expert": 256, "type": "Q4_K"},
}
"""Options of `write_dots` by the variant's name."""

VARIANTS = {name: (write_dots, options, 1e-8) for name, options in DOTS.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

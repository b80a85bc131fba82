"""Tiny models of the MiniMax family: minimax-m2."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_minimax(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    n_rot: int | None = 8,
    n_ff: int = 96,
    n_expert: int = 8,
    n_expert_used: int = 3,
    scoring: int = 2,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, n_q, n_kv = vocabulary_size(tokenizer), n_head * head_dim, n_head_kv * head_dim
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 5000000.0,
        "rope.dimension_count": n_rot,
        "expert_count": n_expert,
        "expert_used_count": n_expert_used,
        "expert_feed_forward_length": n_ff,
        "expert_gating_func": scoring,
    }
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        **{f"{name}.weight": (n_out, n_embd) for name, n_out in projections.items()},
        "attn_q_norm.weight": (n_q,),
        "attn_k_norm.weight": (n_kv,),
        "attn_output.weight": (n_embd, n_q),
        "ffn_norm.weight": (n_embd,),
        "ffn_gate_inp.weight": (n_expert, n_embd),
        "exp_probs_b.bias": (n_expert,),
        "ffn_gate_exps.weight": (n_expert, n_ff, n_embd),
        "ffn_up_exps.weight": (n_expert, n_ff, n_embd),
        "ffn_down_exps.weight": (n_expert, n_embd, n_ff),
    }
    if biases:
        block |= {f"{name}.bias": (n_out,) for name, n_out in projections.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    shapes |= {f"blk.{i}.{name}": shape for i in range(n_layer) for name, shape in block.items()}
    prefixed = {f"minimax-m2.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": "minimax-m2", "metadata": metadata}
    return write_model(path, "minimax-m2", prefixed, shapes, **common, **rest)


MINIMAX: dict[str, dict[str, Any]] = {
    "minimax": {},
    "minimax_whole_rope": {"n_rot": None, "n_head_kv": 4},
    "minimax_mqa": {"n_head_kv": 1, "head_dim": 32, "n_rot": 16, "n_expert_used": 2},
    "minimax_biases": {"biases": True},
    "minimax_fused": {"fused": True, "biases": True, "n_expert_used": 1},
    "minimax_softmax": {"scoring": 1},
    "minimax_q8_0": {"n_expert_used": 4, "type": "Q8_0"},
    "minimax_q4_k": {"n_embd": 256, "head_dim": 64, "n_rot": 32, "n_ff": 256, "n_expert_used": 4, "type": "Q4_K"},
}
"""Options of `write_minimax` by the variant's name."""

VARIANTS = {name: (write_minimax, options, 1e-8) for name, options in MINIMAX.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "minimax-m2": [
        HuggingFaceModel(
            "minimax_m2",
            {"num_local_experts": 8},
            keys={
                "expert_gating_func": 2,
                "rope.dimension_count": lambda config: getattr(config, "rotary_dim", config.head_dim),
            },
            tensors={"model.layers.{}.mlp.e_score_correction_bias": "blk.{}.exp_probs_b.bias"},
        )
    ],
}
"""Models of transformers by architecture."""

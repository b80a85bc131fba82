"""Tiny diffusion language models: llada, llada-moe, dream, rnd1."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size

MASK = 127
"""Id of the mask token."""


def write_diffusion(
    path: str | Path,
    *,
    architecture: str = "llada",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 4,
    head_dim: int = 16,
    n_ff: int = 96,
    n_expert: int = 8,
    tied: bool = False,
    biases: bool = False,
    shift: bool | None = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, n_q, n_kv = vocabulary_size(tokenizer), n_head * head_dim, n_head_kv * head_dim
    has_experts = architecture in ("llada-moe", "rnd1")
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
        "attention.causal": False,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": head_dim,
    }
    if has_experts:
        keys |= {"expert_count": n_expert, "expert_used_count": 3, "expert_feed_forward_length": 32}
    heads = {"attn_q": (n_q, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)}
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        **{f"{name}.weight": shape for name, shape in heads.items()},
        **{f"{name}.bias": shape[:1] for name, shape in heads.items() if biases},
        "attn_output.weight": (n_embd, n_q),
        "ffn_norm.weight": (n_embd,),
    }
    if has_experts:
        block |= {f"attn_{part}_norm.weight": (head_dim,) for part in "qk"}
        block |= {"ffn_gate_inp.weight": (n_expert, n_embd), "ffn_down_exps.weight": (n_expert, n_embd, 32)}
        block |= {f"ffn_{part}_exps.weight": (n_expert, 32, n_embd) for part in ("gate", "up")}
    else:
        block |= {f"ffn_{part}.weight": (n_ff, n_embd) for part in ("gate", "up")}
        block |= {"ffn_down.weight": (n_embd, n_ff)}
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    shapes |= {} if tied else {"output.weight": (n_vocab, n_embd)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(n_layer) for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    prefixed |= {"tokenizer.ggml.mask_token_id": MASK, "diffusion.shift_logits": shift}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed="diffusion", metadata=metadata, **rest
    )


ENCODERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "llada": (write_diffusion, {}, 1e-9),
    "llada_gqa": (write_diffusion, {"n_head_kv": 2, "tied": True}, 1e-9),
    "llada_moe": (write_diffusion, {"architecture": "llada-moe"}, 1e-9),
    "dream": (write_diffusion, {"architecture": "dream", "biases": True, "shift": None}, 1e-9),
    "rnd1": (write_diffusion, {"architecture": "rnd1", "n_head_kv": 2, "shift": None}, 1e-9),
    "llada_q8_0": (write_diffusion, {"type": "Q8_0"}, 1e-9),
    "llada_q4_0": (write_diffusion, {"type": "Q4_0"}, 1e-9),
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

"""Tiny models of Llama 4: llama4."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_llama4(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 4,
    moe_step: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_ff_expert: int = 64,
    n_expert: int = 4,
    n_expert_used: int = 1,
    context_length: int = 256,
    fused: bool = False,
    tied: bool = False,
    rope_freqs: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    n_q, n_kv = n_head * width, n_head_kv * width
    keys: dict[str, Any] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": width,
        "expert_count": n_expert,
        "expert_used_count": n_expert_used,
        "expert_feed_forward_length": n_ff_expert,
        "interleave_moe_layer_step": moe_step,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        block |= {f"{name}.weight": (n_out, n_embd) for name, n_out in projections.items()}
        block["attn_output.weight"] = (n_embd, n_q)
        if moe_step and (i + 1) % moe_step == 0:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_ff_expert, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_ff_expert)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"llama4.{key}": value for key, value in keys.items()}
    return write_model(path, "llama4", prefixed, shapes, tokenizer=tokenizer, seed="llama4", metadata=metadata, **rest)


LLAMA4: dict[str, dict[str, Any]] = {
    "llama4": {},
    "llama4_all_experts": {"moe_step": 1, "n_expert_used": 2, "tied": True, "fused": True},
    "llama4_maverick": {"n_expert": 128, "n_ff_expert": 32},
    "llama4_rope": {
        "rope_freqs": True,
        "metadata": {"llama4.rope.freq_base_swa": 10000.0, "llama4.attention.sliding_window_pattern": 3},
    },
    "llama4_dense": {"moe_step": 0, "n_layer": 5, "n_head_kv": 1},
    "llama4_q8_0": {"type": "Q8_0"},
    "llama4_q4_k": {"n_embd": 256, "n_head": 8, "n_ff": 256, "n_ff_expert": 256, "n_expert_used": 4, "type": "Q4_K"},
}
"""Options of `write_llama4` by the variant's name."""

VARIANTS = {name: (write_llama4, options, 1e-8) for name, options in LLAMA4.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

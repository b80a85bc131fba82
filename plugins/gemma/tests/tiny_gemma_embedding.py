"""Tiny models of EmbeddingGemma: gemma-embedding."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_gemma_embedding(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 6,
    n_embd: int = 64,
    n_head: int = 3,
    n_head_kv: int = 1,
    head_dim: int = 32,
    n_ff: int = 96,
    window: int = 12,
    n_dense: int = 0,
    untied: bool = False,
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
        "attention.sliding_window": window,
        "rope.freq_base": 1000000.0,
        "pooling_type": 1,
    }
    if n_dense:
        keys |= {"dense_2_feat_in": n_embd, "dense_2_feat_out": n_dense}
        keys |= {"dense_3_feat_in": n_dense, "dense_3_feat_out": n_embd}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if untied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if n_dense:
        shapes |= {"dense_2.weight": (n_dense, n_embd), "dense_3.weight": (n_embd, n_dense)}
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        block: dict[str, tuple[int, ...]] = {f"{norm}.weight": (n_embd,) for norm in norms}
        block |= {f"{name}.weight": (n_out, n_embd) for name, n_out in projections.items()}
        block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        block |= {"attn_output.weight": (n_embd, n_q), "ffn_down.weight": (n_embd, n_ff)}
        block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"gemma-embedding.{key}": value for key, value in keys.items()}
    return write_model(
        path, "gemma-embedding", prefixed, shapes, tokenizer=tokenizer, seed="gemma-embedding", metadata=metadata,
        **rest,
    )  # fmt: skip


GEMMA_EMBEDDING: dict[str, dict[str, Any]] = {
    "gemma_embedding": {},
    "gemma_embedding_dense": {"n_dense": 96, "window": 7, "untied": True},
    "gemma_embedding_fused": {
        "fused": True,
        "n_head": 4,
        "n_head_kv": 2,
        "metadata": {"gemma-embedding.attention.sliding_window_pattern": 2, "gemma-embedding.rope.freq_base_swa": 5e3},
    },
    "gemma_embedding_q8_0": {"type": "Q8_0", "n_dense": 96},
}

ENCODERS = {name: (write_gemma_embedding, options, 1e-5) for name, options in GEMMA_EMBEDDING.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name; it reads GELU from a table."""

"""Tiny models of the T5 family: t5, t5encoder."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import random_tensor, write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_t5(
    path: str | Path,
    *,
    architecture: str = "t5",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_decoder: int | None = None,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    head_dim: int = 16,
    n_ff: int = 96,
    n_buckets: int = 32,
    gated: bool = False,
    tied: bool = False,
    every_bias: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path."""
    n_vocab, n_q, has_decoder = vocabulary_size(tokenizer), n_head * head_dim, architecture == "t5"
    keys: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.relative_buckets_count": n_buckets,
    }
    if has_decoder:
        keys |= {"decoder_start_token_id": 0, "decoder_block_count": n_decoder}
    network: dict[str, tuple[int, ...]] = {"ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    network |= {"ffn_gate": (n_ff, n_embd)} if gated else {}
    n_kv = (n_head_kv or n_head) * head_dim
    heads = {"q": (n_q, n_embd), "k": (n_kv, n_embd), "v": (n_kv, n_embd), "o": (n_embd, n_q)}

    def stack(prefix: str, n: int, *parts: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}.output_norm.weight": (n_embd,)}
        for i in range(n):
            block: dict[str, tuple[int, ...]] = {
                f"{part}_{name}": shape for part in parts for name, shape in heads.items()
            } | network
            block |= {f"{part}_norm": (n_embd,) for part in (*parts, "ffn")}
            if not i or every_bias:
                block["attn_rel_b"] = (n_buckets, n_head)
            shapes |= {f"{prefix}.blk.{i}.{name}.weight": shape for name, shape in block.items()}
        return shapes

    shapes = {"token_embd.weight": (n_vocab, n_embd), **stack("enc", n_layer, "attn")}
    if has_decoder:
        shapes |= stack("dec", n_decoder or n_layer, "attn", "cross_attn")
        if not tied:
            shapes["output.weight"] = (n_vocab, n_embd)
    biases = {
        name: 20 * random_tensor("t5", name, shape, "F32")[0] for name, shape in shapes.items() if "rel_b" in name
    }
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed="t5", metadata=metadata,
        tensors=biases | (tensors or {}), **rest,
    )  # fmt: skip


VARIANTS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "t5": (write_t5, {}, 1e-9),
    "t5_gated": (write_t5, {"gated": True, "tied": True, "every_bias": True}, 1e-5),
    "t5_fewer_decoders": (write_t5, {"n_layer": 3, "n_decoder": 1, "n_head": 3, "n_buckets": 16}, 1e-9),
    "t5_q8_0": (write_t5, {"type": "Q8_0"}, 1e-9),
    "t5_q4_0": (write_t5, {"type": "Q4_0", "tied": True}, 1e-9),
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name; it reads GELU from a table."""

ENCODERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "t5encoder": (write_t5, {"architecture": "t5encoder"}, 1e-8),
    "t5encoder_gated": (write_t5, {"architecture": "t5encoder", "gated": True}, 1e-5),
}

"""Tiny models of the Cohere family: command-r and cohere2."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_cohere(
    path: str | Path,
    *,
    architecture: str = "command-r",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_rot: int | None = None,
    logit_scale: float | None = 0.25,
    window: int = 8,
    fused: bool = False,
    biases: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `n_rot` dimensions of each head are rotated. `window` is that of cohere2's sliding layers. Queries, keys and values
    are stored as one matrix if `fused`. A command-r model of 64 layers or more has norms of queries and keys.
    """
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": n_rot,
        "rope.freq_base": 50000.0,
        "rope.scaling.type": "none",
        "logit_scale": logit_scale,
        "attention.sliding_window": window if architecture == "cohere2" else None,
    }
    n_kv = n_head_kv * width
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "attn_output.weight": (n_embd, n_embd)}
    for name, n_out in projections.items():
        block[f"{name}.weight"] = (n_out, n_embd)
        if biases:
            block[f"{name}.bias"] = (n_out,)
    if architecture == "command-r" and n_layer >= 64:
        block |= {"attn_q_norm.weight": (n_head, width), "attn_k_norm.weight": (n_head_kv, width)}
    block |= {"ffn_gate.weight": (n_ff, n_embd), "ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(n_layer) for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": architecture, "metadata": metadata}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_COHERE2 = {"architecture": "cohere2", "n_layer": 4}
_WIDE = {"n_embd": 256, "n_ff": 512, "type": "Q4_K"}

COHERE: dict[str, dict[str, Any]] = {
    "command_r": {},
    "command_r_mha": {"n_head_kv": 4, "logit_scale": None},
    "command_r_mqa": {"n_head_kv": 1, "logit_scale": 0.0},
    "command_r_biases": {"biases": True, "n_rot": 12},
    "command_r_fused": {"fused": True, "biases": True},
    "command_r_linear": {"metadata": {"command-r.rope.scaling.type": "linear", "command-r.rope.scaling.factor": 4.0}},
    "command_r_plus": {"n_layer": 64, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 32},
    "command_r_q8_0": {"type": "Q8_0"},
    "command_r_q4_k": _WIDE,
    "cohere2": _COHERE2,
    "cohere2_mqa": _COHERE2 | {"n_head_kv": 1, "logit_scale": 0.0},
    "cohere2_biases": _COHERE2 | {"biases": True, "n_rot": 12},
    "cohere2_period_2": _COHERE2 | {"metadata": {"cohere2.attention.sliding_window_pattern": 2}},
    "cohere2_layers_named": _COHERE2
    | {"metadata": {"cohere2.attention.sliding_window_pattern": [False, True, True, False]}},
    "cohere2_all_slide": _COHERE2 | {"metadata": {"cohere2.attention.sliding_window_pattern": 0}},
    "cohere2_q8_0": _COHERE2 | {"type": "Q8_0"},
    "cohere2_q4_k": _COHERE2 | _WIDE,
}
"""Options of `write_cohere` by the variant's name."""

VARIANTS = {name: (write_cohere, options, 1e-8) for name, options in COHERE.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

INERT = ("blk.3.attn_k.bias",)
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""

TRANSFORMERS = {
    "command-r": [HuggingFaceModel("cohere")],
    "cohere2": [HuggingFaceModel("cohere2")],
}
"""Models of transformers by architecture."""

"""Tiny models of the nemotron architecture."""

from pathlib import Path
from typing import Any

from llamacli.plugin import PLUS_ONE
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def write_nemotron(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "nemotron",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_rot: int | None = None,
    n_ff: int = 96,
    biases: tuple[str, ...] = (),
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the architecture; return its path.

    `n_rot` dimensions of each head are rotated, half of them by default; `biases` are the matrices that have one. The
    rest is as in `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": n_rot or width // 2,
        "rope.freq_base": 10000.0,
    }
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output.weight": (n_vocab, n_embd)}
    n_q, n_kv = n_head * width, n_head_kv * width
    linears = {"attn_output": (n_embd, n_q), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    if fused:
        linears["attn_qkv"] = (n_q + 2 * n_kv, n_embd)
    else:
        linears |= {"attn_q": (n_q, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)}
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(n_layer) for name in ("attn_norm", "ffn_norm"))]
    for norm in norms:
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_embd,)
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"blk.{i}.{name}.bias": linears[name][:1] for name in biases}
    prefixed = {f"nemotron.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": seed, "metadata": metadata}
    return write_model(path, "nemotron", prefixed, shapes, **common, **rest)


NEMOTRON: dict[str, dict[str, Any]] = {
    "nemotron": {},
    "nemotron_mqa": {"n_head_kv": 1},
    "nemotron_biases": {"biases": MATRICES},
    "nemotron_fused": {"fused": True, "biases": ("attn_qkv",)},
    "nemotron_full_rope": {"n_rot": 16},
    "nemotron_q8_0": {"type": "Q8_0"},
    "nemotron_q4_k": {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}
"""Options of `write_nemotron` by the variant's name."""

VARIANTS = {name: (write_nemotron, options, 1e-8) for name, options in NEMOTRON.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "nemotron": [
        HuggingFaceModel(
            "nemotron", convert=dict.fromkeys(["output_norm.weight", "attn_norm.weight", "ffn_norm.weight"], PLUS_ONE)
        )
    ],
}
"""Models of transformers by architecture."""

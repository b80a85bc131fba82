"""Tiny models of phi2."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_phi2(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    n_rot: int | None = 8,
    biases: bool = True,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the phi2 architecture; return its path.

    `n_rot` dimensions of each head are rotated. `biases` are those of queries, keys and values, which are stored as one
    matrix if `fused`. The rest is as in `write_model`.
    """
    n_vocab, n_head_kv, width = vocabulary_size(tokenizer), n_head_kv or n_head, n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": n_rot,
    }
    n_kv = n_head_kv * width
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    linears = {"attn_output": (n_embd, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    shapes |= {"output.weight": (n_vocab, n_embd), "output.bias": (n_vocab,)}
    for norm in ("output_norm", *(f"blk.{i}.attn_norm" for i in range(n_layer))):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_embd,)
    for i in range(n_layer):
        for name, n_out in projections.items():
            shapes[f"blk.{i}.{name}.weight"] = (n_out, n_embd)
            if biases:
                shapes[f"blk.{i}.{name}.bias"] = (n_out,)
        for name, shape in linears.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            shapes[f"blk.{i}.{name}.bias"] = shape[:1]
    prefixed = {f"phi2.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": "phi2", "metadata": metadata}
    return write_model(path, "phi2", prefixed, shapes, **common, **rest)


PHI2: dict[str, dict[str, Any]] = {
    "phi2": {},
    "phi2_gqa": {"n_head_kv": 2, "n_rot": None},
    "phi2_mqa": {"n_head_kv": 1},
    "phi2_no_biases": {"biases": False},
    "phi2_fused": {"fused": True, "n_head_kv": 2},
    "phi2_linear": {"metadata": {"phi2.rope.scaling.type": "linear", "phi2.rope.scaling.factor": 2.0}},
    "phi2_q8_0": {"type": "Q8_0"},
    "phi2_q4_k": {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}
"""Options of `write_phi2` by the variant's name."""

GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

VARIANTS = {name: (write_phi2, options, GELU) for name, options in PHI2.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "phi2": [HuggingFaceModel("phi")],
}
"""Models of transformers by architecture."""

"""Tiny models with LayerNorm and partial RoPE: gptneox and stablelm."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_neox(
    path: str | Path,
    *,
    architecture: str = "gptneox",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    n_rot: int | None = 8,
    parallel: bool = True,
    fused: bool = False,
    biases: bool = False,
    query_key_norm: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `n_rot` dimensions of each head are rotated. A stablelm that is not `parallel` has norms before its feed-forward
    networks. `fused`, `biases` (of queries, keys and values) and `query_key_norm` are for stablelm too.
    """
    n_vocab, n_head_kv, width = vocabulary_size(tokenizer), n_head_kv or n_head, n_embd // n_head
    neox = architecture == "gptneox"
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": n_rot,
        "use_parallel_residual": parallel,
    }
    n_kv = n_head_kv * width
    projections = {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    if neox or fused:
        projections = {"attn_qkv": n_embd + 2 * n_kv}
    linears = {name: (n, n_embd) for name, n in projections.items()}
    linears |= {"attn_output": (n_embd, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    if not neox:
        linears["ffn_gate"] = (n_ff, n_embd)
    with_bias = list(linears) if neox else list(projections) if biases else []
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output.weight": (n_vocab, n_embd)}
    norms = ["attn_norm"] if parallel and not neox else ["attn_norm", "ffn_norm"]
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in range(n_layer) for norm in norms)):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (n_embd,)
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"blk.{i}.{name}.bias": linears[name][:1] for name in with_bias}
        if query_key_norm:
            shapes[f"blk.{i}.attn_q_norm.weight"] = (n_head, width)
            shapes[f"blk.{i}.attn_k_norm.weight"] = (n_head_kv, width)
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": architecture, "metadata": metadata}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_WIDE = {"n_embd": 256, "n_ff": 512, "type": "Q4_K"}
_STABLELM = {"architecture": "stablelm", "parallel": False}
_STABLELM_12B = {"architecture": "stablelm", "query_key_norm": True, "n_head_kv": 2}

NEOX: dict[str, dict[str, Any]] = {
    "gptneox": {},
    "gptneox_sequential": {"parallel": False},
    "gptneox_mqa": {"n_head_kv": 1, "n_rot": None},
    "gptneox_linear": {"metadata": {"gptneox.rope.scaling.type": "linear", "gptneox.rope.scaling.factor": 4.0}},
    "gptneox_q8_0": {"type": "Q8_0"},
    "gptneox_q4_k": _WIDE,
    "stablelm": _STABLELM,
    "stablelm_biases": _STABLELM | {"biases": True, "n_head_kv": 2},
    "stablelm_fused": _STABLELM | {"biases": True, "fused": True, "n_head_kv": 1},
    "stablelm_all_rotated": _STABLELM | {"n_rot": None},
    "stablelm_plain_norm": _STABLELM | {"without": [f"blk.{i}.ffn_norm.bias" for i in range(2)]},
    "stablelm_12b": _STABLELM_12B,
    "stablelm_key_norm": _STABLELM_12B | {"without": [f"blk.{i}.attn_q_norm.weight" for i in range(2)]},
    "stablelm_q8_0": _STABLELM_12B | {"type": "Q8_0"},
    "stablelm_q4_k": _STABLELM_12B | _WIDE,
}
"""Options of `write_neox` by the variant's name."""

GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

VARIANTS = {name: (write_neox, options, GELU if name.startswith("gptneox") else 1e-8) for name, options in NEOX.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

UNREAD = ("stablelm.use_parallel_residual",)
"""A key whose value follows from the tensors."""

TRANSFORMERS = {
    "stablelm": [HuggingFaceModel("stablelm")],
    "starcoder2": [HuggingFaceModel("starcoder2")],
}
"""Models of transformers by architecture."""

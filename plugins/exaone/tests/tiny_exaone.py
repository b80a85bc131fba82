"""Tiny models of the EXAONE family: exaone4."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_exaone(
    path: str | Path,
    *,
    architecture: str = "exaone4",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_nextn: int = 0,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    tied: bool = False,
    biases: bool = False,
    fused: bool = False,
    rope_freqs: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path.

    `biases` are those of queries, keys and values; `fused` stores these three as one. There are `n_nextn` blocks for
    multi-token prediction behind `n_layer`; files with 64 layers slide.
    """
    n_vocab, head_dim = vocabulary_size(tokenizer), n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer + n_nextn,
        "nextn_predict_layers": n_nextn or None,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000000.0,
    }
    n_kv = n_head_kv * head_dim
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (head_dim // 2,)
    block: dict[str, tuple[int, ...]] = {
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (n_embd, n_embd),
        "post_attention_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
        "post_ffw_norm.weight": (n_embd,),
    }
    for name, n_out in projections.items():
        block[f"{name}.weight"] = (n_out, n_embd)
        if biases:
            block[f"{name}.bias"] = (n_out,)
    nextn = {"eh_proj": (n_embd, 2 * n_embd), "enorm": (n_embd,), "hnorm": (n_embd,), "shared_head_norm": (n_embd,)}
    for i in range(n_layer + n_nextn):
        draft = {f"nextn.{name}.weight": shape for name, shape in nextn.items()} if i >= n_layer else {}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in (block | draft).items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


def _keys(**values: Any) -> dict[str, Any]:
    return {"metadata": {f"exaone4.{key.replace('__', '.')}": value for key, value in values.items()}}


_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
_DEEP = {"n_layer": 64, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 32}

EXAONE: dict[str, dict[str, Any]] = {
    "exaone4": {},
    "exaone4_mha": {"n_head_kv": 4},
    "exaone4_mqa": {"n_head_kv": 1, "tied": True},
    "exaone4_fused": {"fused": True, "biases": True, "n_layer": 3},
    "exaone4_rope_freqs": {"rope_freqs": True},
    "exaone4_yarn": _keys(**_YARN),
    "exaone4_window_without_effect": _keys(attention__sliding_window=8),
    "exaone4_nextn": {"n_nextn": 1},
    "exaone4_sliding": _DEEP | _keys(attention__sliding_window=8),
    "exaone4_sliding_nextn": _DEEP | {"n_nextn": 1} | _keys(attention__sliding_window=8, **_YARN),
    "exaone4_pattern": _DEEP | {"rope_freqs": True}
    | _keys(attention__sliding_window=8, attention__sliding_window_pattern=[True, False] * 32),
    "exaone4_q8_0": {"type": "Q8_0"},
    "exaone4_q4_k": {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}  # fmt: skip
"""Options of `write_exaone` by the variant's name."""

VARIANTS = {name: (write_exaone, options, 1e-8) for name, options in EXAONE.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "exaone4": [HuggingFaceModel("exaone4")],
}
"""Models of transformers by architecture."""

"""Tiny models of the GPT family: gpt2, starcoder2 and pockettts."""

from pathlib import Path
from typing import Any

from llamacli.plugin import Conversion
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_gpt(
    path: str | Path,
    *,
    architecture: str = "gpt2",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    context_length: int = 256,
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path."""
    n_vocab, n_head_kv, width = vocabulary_size(tokenizer), n_head_kv or n_head, n_embd // n_head
    learned = architecture == "gpt2"
    keys: dict[str, Any] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if not learned:
        keys["rope.freq_base"] = 100000.0
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    if learned:
        shapes["position_embd.weight"] = (context_length, n_embd)
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    n_kv = n_head_kv * width
    projections = {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    linears = {"attn_qkv": (n_embd + 2 * n_kv, n_embd)} if learned else {
        name: (n, n_embd) for name, n in projections.items()
    }  # fmt: skip
    linears |= {"attn_output": (n_embd, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(n_layer) for name in ("attn_norm", "ffn_norm"))]
    for norm in norms:
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_embd,)
    for i in range(n_layer):
        for name, shape in linears.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            if architecture != "pockettts":
                shapes[f"blk.{i}.{name}.bias"] = shape[:1]
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": architecture, "metadata": metadata}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


_STARCODER = {"architecture": "starcoder2", "n_head_kv": 2}

GPT: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2_tied": {"tied": True},
    "gpt2_q8_0": {"type": "Q8_0"},
    "pockettts": {"architecture": "pockettts", "tied": True},
    "starcoder2": _STARCODER,
    "starcoder2_mqa": _STARCODER | {"n_head_kv": 1, "tied": True},
    "starcoder2_q4_k": _STARCODER | {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}
"""Options of `write_gpt` by the variant's name."""

GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

VARIANTS = {name: (write_gpt, options, GELU) for name, options in GPT.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

_CONV1D = [f"{name}.weight" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")]
"""Matrices that the original code stores with inputs first."""

TRANSFORMERS = {
    "gpt2": [
        HuggingFaceModel(
            "gpt2",
            {"n_inner": 96},
            keys={"attention.head_count_kv": lambda config: config.num_attention_heads},
            convert=dict.fromkeys(_CONV1D, Conversion(lambda array, settings: array.T)),
        )
    ]
}
"""Models of transformers by architecture."""

INERT = ("gpt2*:blk.*.attn_k.bias",)
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""

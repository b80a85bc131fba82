"""Tiny models of the BERT family: bert, nomic-bert."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import random_tensor, write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_bert(
    path: str | Path,
    *,
    architecture: str = "bert",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    n_types: int = 2,
    context_length: int = 64,
    pooling: int | None = 2,
    typed: bool = True,
    biased: bool = True,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path.

    Tables of positions and token types are float32, as llama.cpp needs them.
    """
    n_vocab, n_kv = vocabulary_size(tokenizer), (n_head_kv or n_head) * (n_embd // n_head)
    is_nomic = architecture == "nomic-bert"
    keys: dict[str, Any] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": pooling,
        "rope.freq_base": 1000.0 if is_nomic else None,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    if typed:
        shapes["token_types.weight"] = (n_types, n_embd)
    if not is_nomic:
        shapes["position_embd.weight"] = (context_length, n_embd)
    shapes |= {f"token_embd_norm.{kind}": (n_embd,) for kind in ("weight", "bias")}
    projections = {"attn_qkv": n_embd + 2 * n_kv} if fused else {"attn_q": n_embd, "attn_k": n_kv, "attn_v": n_kv}
    for i in range(n_layer):
        matrices = {name: (n_out, n_embd) for name, n_out in (projections | {"attn_output": n_embd}).items()}
        network = {"ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
        matrices |= network
        block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
        if biased:
            without = network if is_nomic else {}
            block |= {f"{name}.bias": shape[:1] for name, shape in matrices.items() if name not in without}
        if is_nomic:
            block["ffn_gate.weight"] = (n_ff, n_embd)
        for norm in ("attn_output_norm", "layer_output_norm"):
            block |= {f"{norm}.{kind}": (n_embd,) for kind in ("weight", "bias")}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    prefixed["tokenizer.ggml.token_type_count"] = n_types
    tables = {
        name: random_tensor("bert", name, shapes[name], "F32")[0]
        for name in ("token_types.weight", "position_embd.weight")
        if name in shapes
    }
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed="bert", metadata=metadata,
        tensors=tables | (tensors or {}), **rest,
    )  # fmt: skip


BERT: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert_untyped": {"typed": False, "n_types": 1, "pooling": 1},
    "bert_one_type": {"n_types": 1, "fused": True},
    "bert_no_biases": {"biased": False, "n_head_kv": 2},
    "bert_q8_0": {"type": "Q8_0"},
}
NOMIC: dict[str, dict[str, Any]] = {
    "nomic_bert": {"pooling": 1},
    "nomic_bert_fused": {"fused": True, "biased": False, "metadata": {"nomic-bert.rope.dimension_count": 8}},
    "nomic_bert_scaled": {"metadata": {"nomic-bert.rope.scaling.factor": 2.0}},
}

INERT = ("bert*.attn_k.bias",)
"""Adds the same to all scores of a query, which softmax cancels out."""

ENCODERS = {name: (write_bert, options, 1e-5) for name, options in BERT.items()} | {
    name: (write_bert, {"architecture": "nomic-bert", **options}, 1e-8) for name, options in NOMIC.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name; it reads GELU from a table."""


def head(*names: str, n_labels: int = 1, n_embd: int = 64) -> dict[str, np.ndarray]:
    """Random tensors of a classifier head."""
    square, rows = (n_embd, n_embd), (n_labels, n_embd)
    shapes = {"cls.weight": square, "cls.bias": square[:1], "cls.norm.weight": square[:1]}
    shapes |= {"cls.output.weight": rows, "cls.output.bias": rows[:1]}
    if "cls.output.weight" not in names:
        shapes |= {"cls.weight": rows, "cls.bias": rows[:1]}
    return {name: random_tensor("head", name, shapes[name], "F32")[0] for name in names}


RANK = {"pooling": 4}
LABELS = ["first", "second", "third"]
CLASSIFIERS = {
    "bert_rank": (write_bert, RANK | {"tensors": head("cls.weight", "cls.bias", "cls.output.weight")}, 1e-5),
    "bert_classes": (
        write_bert,
        RANK
        | {"tensors": head("cls.output.weight", "cls.output.bias", n_labels=3)}
        | {"metadata": {"bert.classifier.output_labels": LABELS}},
        1e-5,
    ),
}
"""Encoders with a classifier head, as `ENCODERS`."""

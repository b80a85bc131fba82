"""Tiny EAGLE-3 draft heads."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_eagle3(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "eagle",
    layers: tuple[int, ...] = (0, 1, 2),
    n_model: int = 64,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    own: Collection[str] = ("token_embd", "output"),
    rope_freqs: bool = False,
    ids: np.ndarray | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a head and return its path.

    `layers` are those of the model that it reads, `n_model` the width of the model's hidden states. `own` are the
    matrices that it does not take of the model; `ids` those of its tokens in the model's vocabulary.
    """
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    keys: dict[str, Any] = {
        "eagle3.context_length": 256,
        "eagle3.embedding_length": n_embd,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": n_ff,
        "eagle3.attention.head_count": n_head,
        "eagle3.attention.head_count_kv": n_head_kv,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-5,
        "eagle3.rope.dimension_count": width,
        "eagle3.target_layers": list(layers),
        "eagle3.target_hidden_size": n_model,
        "eagle3.norm_before_fc": norm_before_fc,
        "eagle3.norm_before_residual": norm_before_residual,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n_embd, len(layers) * n_model),
        "output_norm.weight": (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.attn_norm_2.weight": (n_embd,),
        "blk.0.attn_q.weight": (n_embd, 2 * n_embd),
        "blk.0.attn_k.weight": (n_head_kv * width, 2 * n_embd),
        "blk.0.attn_v.weight": (n_head_kv * width, 2 * n_embd),
        "blk.0.attn_output.weight": (n_embd, n_embd),
        "blk.0.ffn_norm.weight": (n_embd,),
        "blk.0.ffn_gate.weight": (n_ff, n_embd),
        "blk.0.ffn_up.weight": (n_ff, n_embd),
        "blk.0.ffn_down.weight": (n_embd, n_ff),
    }
    if norm_before_fc:
        shapes["enc.output_norm.weight"] = (len(layers) * n_model,)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    n_draft = n_vocab if ids is None else len(ids)
    shapes |= {f"{name}.weight": (n_draft if name == "output" else n_vocab, n_embd) for name in own}
    more = {} if ids is None else {"d2t": ids}
    return write_model(
        path,
        "eagle3",
        keys,
        shapes,
        tokenizer=tokenizer,
        seed=seed,
        metadata=metadata,
        tensors=more | dict(tensors or {}),
        without=without,
    )


IDS = np.random.RandomState(5).permutation(128)[:48].astype(np.int64)

HEADS: dict[str, tuple[Callable[..., Path], dict[str, Any], float]] = {
    "eagle3": (write_eagle3, {}, 1e-9),
    "eagle3_shared": (write_eagle3, {"own": (), "norm_before_residual": True}, 1e-9),
    "eagle3_ids": (write_eagle3, {"layers": (1, 0, 1), "ids": IDS, "norm_before_fc": True, "rope_freqs": True}, 1e-9),
    "eagle3_last": (write_eagle3, {"layers": (0, 1, 4), "own": ("output",), "ids": IDS}, 1e-9),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("gqa", {"n_layer": 3}),
    "eagle3_shared": ("gqa", {"n_layer": 3}),
    "eagle3_ids": ("qwen3_gqa", {}),
    "eagle3_last": ("gptoss_gqa", {}),
}
"""Models of the heads: a variant, and options of it."""

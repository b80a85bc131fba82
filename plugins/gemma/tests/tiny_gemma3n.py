"""Tiny models of Gemma 3n, and variants for goldens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import random_tensor, write_model
from llamacli.testing.vocabularies import vocabulary_size
from tiny_gemma import attention_shapes, network_shapes

N_EMBD_PER_LAYER, N_STREAMS, LAUREL_RANK = 256, 4, 64
"""Sizes that llama.cpp takes for granted."""

FLOATS = ("altup", "laurel", "per_layer_model_proj")
"""Matrices that files have as floats."""


def write_gemma3n(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "gemma3n",
    n_layer: int = 12,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    n_ff: int | list[int] = 96,
    window: int = 12,
    n_shared: int = 0,
    slides: list[bool] | None = None,
    untied: bool = False,
    fused: bool = False,
    keys_of_converters: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of the architecture; return its path.

    The last `n_shared` layers read others' keys and values; of 20 layers on, llama.cpp lets those share. `slides` says
    which layers have a window, four of five by default. `keys_of_converters` adds keys that llama.cpp ignores. The rest
    is as in `write_model`.
    """
    n_vocab = vocabulary_size(tokenizer)
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": slides,
        "rope.freq_base": 1000000.0,
    }
    if keys_of_converters:
        keys |= {
            "altup.active_idx": 0,
            "altup.num_inputs": N_STREAMS,
            "embedding_length_per_layer_input": N_EMBD_PER_LAYER,
            "attention.shared_kv_layers": n_shared,
            "activation_sparsity_scale": [1.6448533535003662] * 10 + [float("-inf")] * (n_layer - 10),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (n_vocab, n_embd),
        "altup_proj": (N_STREAMS - 1, n_embd, n_embd),
        "altup_unembd_proj": (N_STREAMS - 1, n_embd, n_embd),
        "per_layer_token_embd": (n_vocab, n_layer * N_EMBD_PER_LAYER),
        "per_layer_model_proj": (n_layer * N_EMBD_PER_LAYER, n_embd),
        "per_layer_proj_norm": (N_EMBD_PER_LAYER,),
    }
    if untied:
        shapes["output"] = shapes["token_embd"]
    # Alternating signs, so that tied embeddings do not make every token its own most probable successor.
    made: dict[str, np.ndarray] = {"output_norm.weight": np.resize([1.0, -1.0], n_embd)}
    widths = n_ff if isinstance(n_ff, list) else [n_ff] * n_layer
    block = attention_shapes(n_embd, n_head * head_dim, n_head_kv * head_dim, fused) | network_shapes(n_embd, widths[0])
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "altup_router_norm", "post_norm")
    block |= dict.fromkeys((*norms, "laurel_post_norm", "altup_correct_scale"), (n_embd,))
    block |= {
        "attn_k_norm": (head_dim,),
        "altup_router": (N_STREAMS, n_embd),
        "altup_predict_coef": (N_STREAMS * N_STREAMS, N_STREAMS),
        "altup_correct_coef": (N_STREAMS, N_STREAMS),
        "laurel_l": (LAUREL_RANK, n_embd),
        "laurel_r": (n_embd, LAUREL_RANK),
        "inp_gate": (N_EMBD_PER_LAYER, n_embd),
        "proj": (n_embd, N_EMBD_PER_LAYER),
    }
    for i in range(n_layer):
        layer = block | network_shapes(n_embd, widths[i])
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        made[f"blk.{i}.attn_q_norm.weight"] = np.linspace(0.5, 1.5, head_dim) * head_dim**-0.5  # scores have no scale
        # Little of each network, lest the peer's roundings of GELU add up.
        made |= {f"blk.{i}.{name}.weight": np.full(n_embd, 0.2) for name in ("post_ffw_norm", "post_norm")}
        # Routers get inputs of 1 / n_embd.
        router = random_tensor(seed, f"blk.{i}.altup_router", (N_STREAMS, n_embd), "F32")[0]
        made[f"blk.{i}.altup_router.weight"] = n_embd * router
    for name, shape in shapes.items():
        if any(part in name for part in FLOATS) and f"{name}.weight" not in made:
            made[f"{name}.weight"] = random_tensor(seed, f"{name}.weight", shape, "F32")[0]
    full = {f"gemma3n.{key}": value for key, value in keys.items()}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    weights = {name: shape for name, shape in weights.items() if name not in made}
    common = {"tokenizer": tokenizer, "seed": seed, "metadata": metadata, "tensors": made | dict(tensors or {})}
    return write_model(path, "gemma3n", full, weights, **common, **rest)


SHARED = {"n_layer": 25, "n_shared": 5, "n_embd": 32, "n_ff": 64, "head_dim": 8}

GEMMA3N: dict[str, dict[str, Any]] = {
    "gemma3n": {},
    "gemma3n_keys": {"n_ff": [96] * 12, "keys_of_converters": True, "n_head_kv": 1, "slides": [True, True, False] * 4},
    "gemma3n_shared": {**SHARED, "keys_of_converters": True},
    "gemma3n_unsaid": {**SHARED, "untied": True, "fused": True, "metadata": {"gemma3n.rope.freq_base_swa": 5000.0}},
    "gemma3n_q8_0": {"type": "Q8_0"},
    "gemma3n_q4_k": {"n_embd": 256, "head_dim": 64, "n_ff": 256, "n_layer": 11, "type": "Q4_K"},
}
"""Options of `write_gemma3n` by the variant's name."""

GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

VARIANTS = {name: (write_gemma3n, options, GELU) for name, options in GEMMA3N.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

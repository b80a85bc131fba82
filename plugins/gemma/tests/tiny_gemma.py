"""Tiny Gemma models of each generation, and variants for goldens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.plugin import PLUS_ONE
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_gemma(
    path: str | Path,
    *,
    generation: int = 1,
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 96,
    context_length: int = 256,
    window: int | None = None,
    untied: bool = False,
    fused: bool = False,
    metadata: Mapping[str, Any] | None = None,
    **file: Any,
) -> Path:
    """Write a model of Gemma 1, 2 or 3; return its path.

    A `window` makes layers slide, as the generation has it. `untied` adds an output matrix; `fused` puts Q, K and V
    into one tensor. The rest is as in `write_model`.
    """
    architecture = "gemma" if generation == 1 else f"gemma{generation}"
    keys: dict[str, Any] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
    }
    if generation == 2:
        keys |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    if generation == 3:
        keys |= {"rope.freq_base": 1000000.0}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary_size(tokenizer), n_embd)}
    if untied:
        shapes["output"] = shapes["token_embd"]
    for i in range(n_layer):
        block = attention_shapes(n_embd, n_head * head_dim, n_head_kv * head_dim, fused) | network_shapes(n_embd, n_ff)
        block |= {"attn_norm": (n_embd,), "ffn_norm": (n_embd,)}
        if generation > 1:
            block |= {"post_attention_norm": (n_embd,), "post_ffw_norm": (n_embd,)}
        if generation > 2:
            block |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return _write(path, architecture, keys, shapes, metadata, tokenizer=tokenizer, **file)


def _attention_keys(
    slides: Sequence[bool], n_head: int, n_head_kv: tuple[int, int], head_dim: tuple[int, int], window: int
) -> dict[str, Any]:
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": [n_head_kv[0 if sliding else 1] for sliding in slides],
        "attention.key_length": head_dim[1],
        "attention.value_length": head_dim[1],
        "attention.key_length_swa": head_dim[0],
        "attention.value_length_swa": head_dim[0],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": list(slides),
    }


def _rope_keys(head_dim: tuple[int, int]) -> dict[str, Any]:
    return {
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": head_dim[1],
        "rope.dimension_count_swa": head_dim[0],
    }


def write_gemma4(
    path: str | Path,
    *,
    tokenizer: str = "test",
    slides: Sequence[bool] = (True, True, False),
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: tuple[int, int] = (2, 1),
    head_dim: tuple[int, int] = (16, 32),
    n_ff: int | list[int] = 96,
    window: int = 12,
    values: bool = False,
    untied: bool = False,
    fused: bool = False,
    n_expert: int = 0,
    n_expert_used: int = 0,
    n_ff_expert: int = 32,
    expert_scale: bool = True,
    fused_experts: bool = True,
    n_embd_per_layer: int = 0,
    n_shared: int = 0,
    dead: bool = True,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **file: Any,
) -> Path:
    """Write a model of Gemma 4 and return its path.

    Pairs are of layers that slide and of those that do not. `values` gives the latter a projection of V. The last
    `n_shared` layers read others' keys and values; `dead` gives them tensors that nothing reads. The rest is as in
    `write_gemma`.
    """
    n_layer = len(slides)
    widths = n_ff if isinstance(n_ff, list) else [n_ff] * n_layer
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        **_attention_keys(slides, n_head, n_head_kv, head_dim, window),
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": n_embd_per_layer,
        "final_logit_softcapping": 3.0,
        **_rope_keys(head_dim),
    }
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": n_expert_used}
        keys |= {"expert_feed_forward_length": n_ff_expert}
    n_vocab = vocabulary_size(tokenizer)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (n_vocab, n_embd)}
    if untied:
        shapes["output"] = shapes["token_embd"]
    if n_embd_per_layer:
        shapes["per_layer_token_embd"] = (n_vocab, n_layer * n_embd_per_layer)
        shapes["per_layer_model_proj"] = (n_layer * n_embd_per_layer, n_embd)
        shapes["per_layer_proj_norm"] = (n_embd_per_layer,)
    made: dict[str, np.ndarray] = {}
    if not all(slides):  # as the converter makes them: a quarter of the pairs is rotated
        rotated, pairs = head_dim[1] // 8, head_dim[1] // 2
        made["rope_freqs.weight"] = np.repeat([1.0, 1e30], [rotated, pairs - rotated])
    for i, sliding in enumerate(slides):
        width, n_kv = (pair[0 if sliding else 1] for pair in (head_dim, n_head_kv))
        block = attention_shapes(n_embd, n_head * width, n_kv * width, fused) | network_shapes(n_embd, widths[i])
        block |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (n_embd,))
        block |= {"attn_k_norm": (width,)}
        made[f"blk.{i}.attn_q_norm.weight"] = np.linspace(0.5, 1.5, width) * width**-0.5  # scores have no scale
        made[f"blk.{i}.layer_output_scale.weight"] = np.array([0.5 + 0.25 * i])
        if not sliding and not values:
            del block["attn_v"]
        if i >= n_layer - n_shared and not dead:
            del block["attn_k"], block["attn_v"], block["attn_k_norm"]
        if n_expert:
            block |= dict.fromkeys(("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"), (n_embd,))
            block |= {"ffn_gate_inp": (n_expert, n_embd), "ffn_down_exps": (n_expert, n_embd, n_ff_expert)}
            made[f"blk.{i}.ffn_gate_inp.scale"] = n_embd**0.5 * np.linspace(0.5, 2, n_embd)
            if expert_scale:
                made[f"blk.{i}.ffn_down_exps.scale"] = np.linspace(0.5, 1.5, n_expert)
            names = ["ffn_gate_up_exps"] if fused_experts else ["ffn_gate_exps", "ffn_up_exps"]
            block |= dict.fromkeys(names, (n_expert, n_ff_expert * 2 // len(names), n_embd))
        if n_embd_per_layer:
            block |= {"inp_gate": (n_embd_per_layer, n_embd), "proj": (n_embd, n_embd_per_layer)}
            block |= {"post_norm": (n_embd,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made |= tensors or {}
    return _write(path, "gemma4", keys, shapes, metadata, tensors=made, tokenizer=tokenizer, **file)


def write_assistant(
    path: str | Path,
    *,
    tokenizer: str = "test",
    slides: Sequence[bool] = (True, True, False),
    n_embd: int = 32,
    n_model: int = 64,
    n_head: int = 4,
    n_head_kv: tuple[int, int] = (2, 1),
    head_dim: tuple[int, int] = (16, 32),
    n_ff: int = 48,
    window: int = 12,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **file: Any,
) -> Path:
    """Write a draft head and return its path.

    It is that of a model of `write_gemma4`, `n_model` wide.
    """
    n_layer = len(slides)
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "embedding_length_out": n_model,
        "block_count": n_layer,
        "nextn_predict_layers": n_layer,
        "feed_forward_length": n_ff,
        **_attention_keys(slides, n_head, n_head_kv, head_dim, window),
        "attention.shared_kv_layers": n_layer,
        **_rope_keys(head_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary_size(tokenizer), n_embd),
        "nextn.post_projection": (n_model, n_embd),
        "nextn.pre_projection": (n_embd, 2 * n_model),
    }
    rotated, pairs = head_dim[1] // 8, head_dim[1] // 2
    made: dict[str, np.ndarray] = {}
    if not all(slides):
        made["rope_freqs.weight"] = np.repeat([1.0, 1e30], [rotated, pairs - rotated])
    for i, sliding in enumerate(slides):
        width = head_dim[0 if sliding else 1]
        block = network_shapes(n_embd, n_ff) | {"attn_q": (n_head * width, n_embd)}
        block |= {"attn_output": (n_embd, n_head * width)}
        block |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (n_embd,))
        made[f"blk.{i}.attn_q_norm.weight"] = np.linspace(0.5, 1.5, width) * width**-0.5
        made[f"blk.{i}.layer_output_scale.weight"] = np.array([0.5 + 0.25 * i])
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made |= tensors or {}
    return _write(path, "gemma4-assistant", keys, shapes, metadata, tensors=made, tokenizer=tokenizer, **file)


def attention_shapes(n_embd: int, n_q: int, n_kv: int, fused: bool) -> dict[str, tuple[int, ...]]:
    """The projections of attention."""
    rows = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    return {name: (n, n_embd) for name, n in rows.items()} | {"attn_output": (n_embd, n_q)}


def network_shapes(n_embd: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a feed-forward network."""
    return {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}


def _write(
    path: str | Path,
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, Any] | None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **file: Any,
) -> Path:
    """Write a model from short names and keys; `metadata` has full keys."""
    # Alternating signs, so that tied embeddings do not make every token its own most probable successor.
    signs = np.resize([1.0, -1.0], shapes["token_embd"][1])
    full = {f"{architecture}.{key}": value for key, value in keys.items()}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    made = {"output_norm.weight": signs} | dict(tensors or {})
    return write_model(path, architecture, full, weights, seed="gemma", metadata=metadata, tensors=made, **file)


E_SERIES = {"slides": (True, True, False, True, True, False), "n_shared": 3, "values": True, "n_embd_per_layer": 16}
EXPERTS = {"n_expert": 8, "n_expert_used": 3}
WIDE = {"n_embd": 256, "n_ff": 512}

GEMMA: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma_mqa": {"n_head_kv": 1, "head_dim": 16},
    "gemma_q8_0": {"type": "Q8_0"},
    "gemma2": {"generation": 2, "window": 12},
    "gemma2_27b": {"generation": 2, "window": 12, "n_layer": 46, "n_embd": 32, "n_ff": 32},
    "gemma2_q4_k": {
        "generation": 2,
        "window": 12,
        "type": "Q4_K",
        "head_dim": 64,
        **WIDE,
        "metadata": {"gemma2.final_logit_softcapping": 30.0},
    },
    "gemma3": {"generation": 3, "window": 10, "n_layer": 7},
    "gemma3_untied": {"generation": 3, "window": 10, "n_layer": 6, "untied": True, "fused": True},
    "gemma3_global": {"generation": 3, "n_head_kv": 1},
    "gemma3_linear": {
        "generation": 3,
        "window": 16,
        "n_layer": 3,
        "metadata": {
            "gemma3.attention.sliding_window_pattern": 3,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
            "gemma3.rope.freq_base_swa": 5000.0,
            "gemma3.final_logit_softcapping": 3.0,
        },
    },
    "gemma3_yarn": {
        "generation": 3,
        "metadata": {
            "gemma3.rope.scaling.type": "yarn",
            "gemma3.rope.scaling.factor": 4.0,
            "gemma3.rope.scaling.original_context_length": 32,
        },
    },
    "gemma3_27b": {
        "generation": 3,
        "window": 10,
        "n_layer": 62,
        "n_embd": 32,
        "n_ff": 32,
        # Little of so many networks, lest the peer's roundings of GELU add up.
        "tensors": {f"blk.{i}.post_ffw_norm.weight": np.full(32, 0.2) for i in range(62)},
    },
    "gemma3_q6_k": {"generation": 3, "window": 10, "n_layer": 6, "type": "Q6_K", "head_dim": 64, **WIDE},
}
"""Options of `write_gemma` by the variant's name."""

GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4_values": {"values": True, "untied": True, "fused": True},
    "gemma4_moe": EXPERTS,
    "gemma4_moe_apart": {**EXPERTS, "fused_experts": False, "expert_scale": False, "values": True},
    "gemma4_e": E_SERIES,
    "gemma4_e_wide": {**E_SERIES, "dead": False, "n_ff": [96, 96, 96, 192, 192, 192], "n_head_kv": (1, 1)},
    "gemma4_q8_0": {**EXPERTS, "type": "Q8_0"},
    "gemma4_e_q8_0": {**E_SERIES, "type": "Q8_0", "n_embd_per_layer": 32},
    "gemma4_q4_k": {
        "type": "Q4_K",
        "head_dim": (32, 64),
        "n_head": 8,
        **WIDE,
        "metadata": {"gemma4.final_logit_softcapping": 30.0},
    },
}
"""Options of `write_gemma4` by the variant's name."""

GELU = 1e-5
"""Bound for GELU, which the peer reads from a float16 table."""

CACHE_HEADS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "gemma4_assistant": (write_assistant, {}, GELU),
    "gemma4_assistant_e": (write_assistant, {"slides": (True, False, True, True)}, GELU),
}
MODELS: dict[str, str] = {"gemma4_assistant": "gemma4", "gemma4_assistant_e": "gemma4_e"}
"""Models of the heads."""

HEADS = CACHE_HEADS

VARIANTS = {
    **{name: (write_gemma, options, GELU) for name, options in GEMMA.items()},
    **{name: (write_gemma4, options, GELU) for name, options in GEMMA4.items()},
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "gemma2": [
        HuggingFaceModel(
            "gemma2",
            {"sliding_window": 8, "query_pre_attn_scalar": 32, "head_dim": 32},
            keys={
                "attn_logit_softcapping": lambda config: config.attn_logit_softcapping,
                "final_logit_softcapping": lambda config: config.final_logit_softcapping,
            },
            tensors={
                "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
                "model.layers.{}.pre_feedforward_layernorm.weight": "blk.{}.ffn_norm.weight",
                "model.layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight",
            },
            convert=dict.fromkeys(
                [
                    f"{name}.weight"
                    for name in ("output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
                ],
                PLUS_ONE,
            ),
        )
    ],
    "gemma": [
        HuggingFaceModel(
            "gemma", convert=dict.fromkeys(["output_norm.weight", "attn_norm.weight", "ffn_norm.weight"], PLUS_ONE)
        )
    ],
}
"""Models of transformers by architecture."""

INERT = ("blk.[25].layer_output_scale.weight",)
"""Scale of the last of three or six layers, which the norm of the output cancels out."""

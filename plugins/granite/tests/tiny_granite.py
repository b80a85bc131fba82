"""Tiny models of the Granite family: granite and granitemoe."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.plugin import INTERLEAVED
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_granite(
    path: str | Path,
    *,
    architecture: str = "granite",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_ff_shared: int = 0,
    n_expert: int = 0,
    n_expert_used: int = 0,
    tied: bool = False,
    fused: bool = False,
    biases: bool = False,
    rope_freqs: bool = False,
    longrope: bool = False,
    recurrent: tuple[int, ...] = (),
    n_head_state: int = 4,
    n_group: int = 2,
    d_state: int = 16,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `longrope` writes factors for contexts up to 32 tokens and beyond. The layers `recurrent` of a hybrid have a state
    space of `n_head_state` heads in `n_group` groups. The rest is as in `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": width,
        "rope.freq_base": 10000.0,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "attention.scale": 0.11,
        "logit_scale": 0.5,
    }
    content = dict(tensors or {})
    if longrope:
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32}
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, width // 2),
            "rope_factors_short.weight": np.linspace(1, 2, width // 2),
        } | content
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    n_kv = n_head_kv * width
    linears = {"attn_q": (n_embd, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)}
    if fused:
        linears = {"attn_qkv": (n_embd + 2 * n_kv, n_embd)}
    linears["attn_output"] = (n_embd, n_embd)
    plain: dict[str, tuple[int, ...]] = {"attn_norm": (n_embd,), "ffn_norm": (n_embd,)}
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": n_expert_used}
        plain["ffn_gate_inp"] = (n_expert, n_embd)
        plain |= {f"{name}_exps": (n_expert, *shape) for name, shape in _network(n_ff, n_embd).items()}
        if n_ff_shared:
            keys["expert_shared_feed_forward_length"] = n_ff_shared
            plain |= {f"{name}_shexp": shape for name, shape in _network(n_ff_shared, n_embd).items()}
    else:
        linears |= _network(n_ff, n_embd)
    if architecture == "granitehybrid":
        keys["attention.head_count_kv"] = [0 if i in recurrent else n_head_kv for i in range(n_layer)]
        sizes = {"conv_kernel": 4, "inner_size": 2 * n_embd, "state_size": d_state, "group_count": n_group}
        keys["ssm.time_step_rank"] = n_head_state
        keys |= {f"ssm.{key}": value for key, value in sizes.items()}
    state_space = _state_space(n_embd, n_head_state, n_group, d_state)
    for i in range(n_layer):
        kept = {name: shape for name, shape in linears.items() if i not in recurrent or not name.startswith("attn")}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in (kept | plain).items()}
        if i in recurrent:
            shapes |= {f"blk.{i}.{name}": shape for name, shape in state_space.items()}
        if biases:
            shapes |= {f"blk.{i}.{name}.bias": shape[:1] for name, shape in linears.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": "granite", "metadata": metadata, "tensors": content}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


def _network(n_ff: int, n_embd: int) -> dict[str, tuple[int, int]]:
    return {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}


def _state_space(n_embd: int, n_head: int, n_group: int, d_state: int) -> dict[str, tuple[int, ...]]:
    d_inner, d_conv = 2 * n_embd, 2 * n_embd + 2 * n_group * d_state
    return {
        "ssm_in.weight": (d_inner + d_conv + n_head, n_embd),
        "ssm_conv1d.weight": (d_conv, 4),
        "ssm_conv1d.bias": (d_conv,),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (n_head, 1),
        "ssm_d": (n_head, 1),
        "ssm_norm.weight": (n_group, d_inner // n_group),
        "ssm_out.weight": (n_embd, d_inner),
    }


HYBRID = {"architecture": "granitehybrid", "n_layer": 4, "recurrent": (0, 1, 3)}
MOE = {"architecture": "granitemoe", "n_ff": 64, "n_expert": 8, "n_expert_used": 2}
_BARE = {f"granite.{key}": None for key in ("embedding_scale", "residual_scale", "attention.scale")}

GRANITE: dict[str, dict[str, Any]] = {
    "granite": {},
    "granite_mqa": {"n_head_kv": 1},
    "granite_tied": {"tied": True, "metadata": {"granite.embedding_scale": 0.2}},
    "granite_fused_biases": {"fused": True, "biases": True},
    "granite_unscaled": {"metadata": _BARE},
    "granite_zero_scales": {"metadata": dict.fromkeys(_BARE, 0.0)},
    "granite_nope": {"metadata": {"granite.rope.scaling.finetuned": False}},
    "granite_rope_freqs": {"rope_freqs": True},
    "granite_longrope": {"longrope": True},
    "granite_longrope_short": {
        "longrope": True,
        "metadata": {"granite.rope.scaling.original_context_length": 256},
    },
    "granite_q8_0": {"type": "Q8_0"},
    "granite_q4_k": {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
    "granitemoe": MOE,
    "granitemoe_shared": MOE | {"n_ff_shared": 96},
    "granitemoe_dense": {"architecture": "granitemoe"},
    "granitehybrid": HYBRID,
    "granitehybrid_nope": HYBRID | {"tied": True, "metadata": {"granitehybrid.rope.scaling.finetuned": False}},
    "granitehybrid_experts": HYBRID | {"n_ff": 64, "n_expert": 8, "n_expert_used": 2, "n_ff_shared": 96},
    "granitehybrid_q8_0": HYBRID | {"type": "Q8_0"},
    "granitehybrid_q4_k": HYBRID | {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
    "granitemoe_q8_0": MOE | {"n_ff_shared": 96, "type": "Q8_0"},
}
"""Options of `write_granite` by the variant's name."""

VARIANTS = {name: (write_granite, options, 1e-8) for name, options in GRANITE.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

SCALES = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.125,
}

TRANSFORMERS = {
    "granitemoe": [
        HuggingFaceModel(
            "granitemoe",
            SCALES | {"num_local_experts": 8},
            tensors={
                "model.layers.{}.block_sparse_moe.router.weight": "blk.{}.ffn_gate_inp.weight",
                "model.layers.{}.block_sparse_moe.router.layer.weight": "blk.{}.ffn_gate_inp.weight",
                "model.layers.{}.block_sparse_moe.input_linear.weight": "blk.{}.ffn_gate_up_exps.weight",
                "model.layers.{}.block_sparse_moe.output_linear.weight": "blk.{}.ffn_down_exps.weight",
            },
            convert=INTERLEAVED,
        )
    ],
    "granite_swa": [
        HuggingFaceModel(
            "granite_swa",
            {"sliding_window": 8},
            keys={
                "attention.sliding_window_pattern": lambda config: [
                    kind == "sliding_attention" for kind in config.layer_types
                ]
            },
            convert=INTERLEAVED,
        )
    ],
    "granite": [
        HuggingFaceModel(
            "granite",
            SCALES,
            convert=INTERLEAVED,
        )
    ],
}
"""Models of transformers by architecture."""

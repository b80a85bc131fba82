"""Hugging Face checkpoints of Command R, Aya and Cohere 2."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl, n_blocks

LLAMACLI_API = 1


def _head_dim(settings: Settings) -> int:
    return int(settings["hidden_size"] // settings["num_attention_heads"])


def _rope_dims(settings: Settings) -> int:
    return int(settings.get("rotary_pct", 1.0) * _head_dim(settings))


def _n_dense(settings: Settings) -> int:
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return int(settings.get("first_k_dense_replace") or 0)
    return next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))


def _n_shared(settings: Settings) -> int | None:
    if not settings.get("num_shared_experts"):
        return None
    if (strategy := settings.get("shared_expert_combination_strategy", "average")) != "average":
        raise ValueError(f"shared_expert_combination_strategy is {strategy!r}, expected 'average'")
    return int(settings["num_shared_experts"])


_KEYS: dict[str, Any] = {
    "logit_scale": lambda settings: float(settings["logit_scale"]),
    "attention.sliding_window": lambda settings: settings["sliding_window"],
    "vocab_size": lambda settings: settings["vocab_size"],
    "rope.dimension_count": _rope_dims,
    "rope.scaling.type": "none",
}

_DEFAULTS: dict[str, Any] = {
    "logit_scale": 0.0625, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
    "num_key_value_heads": lambda settings: settings["num_attention_heads"],
}  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "command-r", ("CohereForCausalLM",),
        {
            "logit_scale": field("logit_scale", kind=float), "rope.scaling.type": "none",
            "context_length": field("model_max_length", "max_position_embeddings"),
        },
        _DEFAULTS, pre=("command-r",),
    ),
    Checkpoint(
        "cohere2", ("Cohere2ForCausalLM",), _KEYS, _DEFAULTS | {"sliding_window": 4096, "head_dim": _head_dim},
        pre=("command-r",),
    ),
    Checkpoint(
        "cohere2moe", ("Cohere2MoeForCausalLM",),
        _KEYS | {
            "block_count": n_blocks, "rope.dimension_count": field("head_dim"),
            "nextn_predict_layers": lambda settings: settings.get("num_nextn_predict_layers") or None,
            "attention.sliding_window_pattern":
            lambda settings: [kind == "sliding_attention" for kind in settings["layer_types"]],
            "expert_feed_forward_length": field("intermediate_size"), "leading_dense_block_count": _n_dense,
            "expert_weights_norm": field("norm_topk_prob", kind=bool), "expert_shared_count": _n_shared,
            "expert_shared_feed_forward_length":
            lambda settings: settings["intermediate_size"] * settings.get("num_shared_experts", 0) or None,
        },
        _DEFAULTS | {"sliding_window": 4096, "head_dim": 128, "norm_topk_prob": True, "expert_selection_fn": "softmax",
                     "layer_norm_eps": 1e-5},
        pre=("cohere2moe", "command-r"), names="exaone-moe",
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

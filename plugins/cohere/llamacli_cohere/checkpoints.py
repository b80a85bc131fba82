"""Hugging Face checkpoints of Command R, Aya, Command R7B and Command A."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl

LLAMACLI_API = 1


def _head_dim(settings: Settings) -> int:
    return int(settings["hidden_size"] // settings["num_attention_heads"])


def _rope_dims(settings: Settings) -> int:
    return int(settings.get("rotary_pct", 1.0) * _head_dim(settings))


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
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

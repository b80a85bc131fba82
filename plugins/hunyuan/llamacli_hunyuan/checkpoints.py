"""Hugging Face checkpoints of Hunyuan, dense."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl, rope_of

LLAMACLI_API = 1

_LONG = 256 * 1024
"""Context length with dynamic RoPE; that of config.json is too small."""


def _dynamic(value: Callable[[Settings], Any] | Any, other: Callable[[Settings], Any] | None = None) -> Any:
    """Value with dynamic RoPE, and that of another function without."""

    def found(settings: Settings) -> Any:
        if rope_of(settings).get("rope_type") == "dynamic":
            return value(settings) if callable(value) else value
        return other(settings) if other else None

    return found


def _base(settings: Settings) -> float:
    rope, dim = rope_of(settings), settings["head_dim"]
    return float(rope.get("rope_theta", 10000.0) * rope.get("alpha", 50) ** (dim / (dim - 2)))


def _end(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    end = settings.get("eod_token_id")
    return {} if end is None else {"tokenizer.ggml.eos_token_id": int(end)}


CHECKPOINTS = (
    Checkpoint(
        "hunyuan-dense", ("HunYuanDenseV1ForCausalLM",),
        {
            "rope.freq_base": _dynamic(_base, lambda settings: float(rope_of(settings)["rope_theta"])),
            "rope.scaling.type": _dynamic("none"), "rope.scaling.factor": _dynamic(1.0),
            "rope.scaling.original_context_length": _dynamic(_LONG),
            "context_length": _dynamic(_LONG, field("max_position_embeddings")), "expert_count": None,
        },
        {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
         "head_dim": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
         "num_key_value_heads": lambda settings: settings["num_attention_heads"]},
        pre=("hunyuan-dense", "hunyuan", "qwen2"), tokenizer=_end,
        drop=lambda settings: (r"^lm_head\.",) if settings.get("tie_word_embeddings") else (),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

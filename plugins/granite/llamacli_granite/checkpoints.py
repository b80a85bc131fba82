"""Hugging Face checkpoints of Granite."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, hookimpl

LLAMACLI_API = 1

_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def _scale(field: str) -> Callable[[Settings], float | None]:
    return lambda settings: float(settings[field]) if settings.get(field) else None


_KEYS: dict[str, Any] = {
    "vocab_size": lambda settings: settings["vocab_size"],
    "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
    "attention.key_length": None,
    "attention.value_length": None,
    **{key: _scale(field) for key, field in _SCALES.items()},
}

DENSE = Checkpoint(
    "granite", ("GraniteForCausalLM",), _KEYS,
    {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048, **dict.fromkeys(_SCALES.values(), 1.0)},
    ("sentencepiece", "byte_fallback", "bpe"), ("refact", "gpt-2"), convert=INTERLEAVED,
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    register(DENSE)

"""Hugging Face checkpoints of EXAONE 4.0."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl, wavelength_factors

LLAMACLI_API = 1


def _pattern(settings: Settings) -> list[bool] | None:
    if settings.get("sliding_window") is None:
        return None
    if kinds := settings.get("layer_types"):
        return [kind == "sliding_attention" for kind in kinds]
    pattern: Any = settings.get("sliding_window_pattern")
    layers = range(settings["num_hidden_layers"])
    if isinstance(pattern, int):
        return [(i + 1) % pattern != 0 for i in layers]
    return [pattern[i % len(pattern)] == "L" for i in layers] if pattern else None


CHECKPOINTS = (
    Checkpoint(
        "exaone4", ("Exaone4ForCausalLM",),
        {"vocab_size": field("vocab_size"), "attention.sliding_window": field("sliding_window"),
         "attention.sliding_window_pattern": _pattern},
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rope_theta": 10000.0,
         "head_dim": lambda settings: settings["hidden_size"] // settings["num_attention_heads"]},
        pre=("exaone4", "gpt-2"), extra=wavelength_factors("llama3", factor=16.0),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Apertus."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import Checkpoint, Settings, field, head_dim, hookimpl, wavelength_factors
from llamacli_apertus import Xielu

LLAMACLI_API = 1


def _keys(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Numbers of xIELU, which are tensors, and the space before texts."""
    space = tokenizer.get("add_prefix_space")
    found: dict[str, Any] = {} if space is None else {"tokenizer.ggml.add_space_prefix": bool(space)}
    blocks = [f"model.layers.{i}.mlp.act_fn." for i in range(settings["num_hidden_layers"])]
    for name in (number.name for number in attrs.fields(Xielu)):
        found[f"xielu.{name}"] = [float(settings["numbers"](f"{block}{name}").item()) for block in blocks]
    return found


CHECKPOINTS = (
    Checkpoint(
        "apertus", ("ApertusForCausalLM",), {"vocab_size": field("vocab_size"), "rope.dimension_count": head_dim},
        {"num_key_value_heads": lambda settings: settings["num_attention_heads"], "rms_norm_eps": 1e-5,
         "max_position_embeddings": 65536},
        ("sentencepiece", "byte_fallback", "bpe"), ("tekken",), _keys, drop=(r"\.mlp\.act_fn\.",),
        extra=wavelength_factors("llama3"),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

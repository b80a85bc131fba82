"""Hugging Face checkpoints of Nemotron-4 and Minitron."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import PLUS_ONE, Checkpoint, Settings, field, hookimpl, rope_of

LLAMACLI_API = 1


def _rope_dims(settings: Settings) -> int:
    width = int(rope_of(settings)["partial_rotary_factor"] * settings["hidden_size"])
    return int(width // settings["num_attention_heads"])


def _factor(settings: Settings) -> float | None:
    factor = settings.get("factor") or rope_of(settings).get("factor")
    return None if factor is None else float(factor)


def _special(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 1}


CHECKPOINTS = (
    Checkpoint(
        "nemotron", ("NemotronForCausalLM",),
        {
            "vocab_size": field("vocab_size"), "rope.dimension_count": _rope_dims,
            "attention.layer_norm_epsilon": field("layer_norm_eps", "norm_eps", kind=float),
            "rope.scaling.type": lambda settings: "none" if _factor(settings) is None else "linear",
            "rope.scaling.factor": _factor,
        },
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
         "num_key_value_heads": lambda settings: settings["num_attention_heads"]},
        ("sentencepiece",), tokenizer=_special,
        convert=dict.fromkeys(("attn_norm.weight", "ffn_norm.weight", "output_norm.weight"), PLUS_ONE),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

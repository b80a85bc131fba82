"""Hugging Face checkpoints of Phi-2, Phi-3, Phi-3.5, its mixture and Phi-4."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.plugin import Checkpoint, Settings, hookimpl, rope_of

LLAMACLI_API = 1


def _rope_dims(settings: Settings) -> int:
    share = rope_of(settings).get("partial_rotary_factor", 1.0)
    return int(share * settings["hidden_size"]) // int(settings["num_attention_heads"])


def _original(settings: Settings) -> int:
    return int(rope_of(settings)["original_max_position_embeddings"])


def _attention_factor(settings: Settings) -> float | None:
    """Factor of queries and keys in long contexts."""
    rope = rope_of(settings)
    if not rope.get("long_factor"):
        return None
    scale = settings["max_position_embeddings"] / _original(settings)
    if scale <= 1:
        return 1.0
    if rope["rope_type"] == "yarn":
        return float(0.1 * math.log(scale) + 1.0)
    return math.sqrt(1 + math.log(scale) / math.log(_original(settings)))


def _factors(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    rope, n = rope_of(settings), _rope_dims(settings) // 2
    if not rope.get("long_factor"):
        return {}
    found = {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
    for name, factors in found.items():
        if len(factors) != n:
            raise ValueError(f"{name} has {len(factors)} numbers, expected {n}")
    return found


def _gpt2(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_bos_token": False}


_SHARED: dict[str, Any] = {
    "num_key_value_heads": lambda settings: settings["num_attention_heads"], "rope_theta": 10000.0,
}  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "phi2", ("PhiForCausalLM",),
        {
            "feed_forward_length": lambda settings: 4 * settings["hidden_size"],
            "attention.head_count_kv": lambda settings: settings["num_attention_heads"],
            "rope.dimension_count": _rope_dims, "rope.freq_base": None,
            "attention.layer_norm_rms_epsilon": None,
        },
        _SHARED | {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
        pre=("gpt-2",), tokenizer=_gpt2,
    ),
    *(
        Checkpoint(
            architecture, tuple(classes),
            {
                "rope.dimension_count": _rope_dims, "rope.scaling.original_context_length": _original,
                "rope.scaling.attn_factor": _attention_factor, "rope.scaling.type": None,
                "attention.sliding_window": lambda settings: settings.get("sliding_window") or 0,
                "attention.key_length": None, "attention.value_length": None,
            },
            _SHARED | {
                "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            },
            ("sentencepiece", "bpe"), pre=("gpt-4o", "dbrx", "gpt-2"), extra=_factors,
        )
        for architecture, *classes in (
            ("phi3", "Phi3ForCausalLM", "Phi4ForCausalLMV"), ("phimoe", "PhiMoEForCausalLM"),
        )
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Qwen2, Qwen3 and their mixtures of experts."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, hookimpl

LLAMACLI_API = 1

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
_EXPERT_KEYS: dict[str, Any] = {
    "expert_feed_forward_length": lambda settings: settings.get("moe_intermediate_size"),
    "expert_shared_feed_forward_length": lambda settings: settings.get("shared_expert_intermediate_size"),
}
_STACKED: dict[str, Any] = {
    "rename": ((r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),),
    "split": {
        r"\.experts\.gate_up_proj\.weight$": (".experts.gate_proj.weight", ".experts.up_proj.weight"),
    },
}
"""Experts that transformers 5 keeps in one tensor, the gate above the up matrix."""


def _head_dim(settings: Settings) -> int:
    return int(settings["hidden_size"] // settings["num_attention_heads"])


_PRE = ("qwen2", "deepseek-r1-qwen")
_MOE = {"num_experts_per_tok": 4, "num_key_value_heads": 16}

CHECKPOINTS = (
    Checkpoint(
        "qwen2", ("Qwen2ForCausalLM", "KORMoForCausalLM"), {}, _DEFAULTS, ("sentencepiece", "bpe"), _PRE
    ),
    Checkpoint(
        "qwen2", ("Qwen2Model",), {}, _DEFAULTS, ("sentencepiece", "bpe"), _PRE, rename=((r"^", "model."),)
    ),
    Checkpoint(
        "qwen2moe", ("Qwen2MoeForCausalLM",), _EXPERT_KEYS,
        _DEFAULTS | _MOE | {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        ("bpe",), _PRE, **_STACKED,
    ),
    Checkpoint(
        "qwen3", ("Qwen3ForCausalLM",), {}, _DEFAULTS | {"head_dim": 128}, ("sentencepiece", "bpe"), _PRE
    ),
    Checkpoint(
        "qwen3moe", ("Qwen3MoeForCausalLM",), _EXPERT_KEYS,
        _DEFAULTS | _MOE | {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "num_key_value_heads": 4, "head_dim": _head_dim,
        },
        ("bpe",), _PRE, **_STACKED,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

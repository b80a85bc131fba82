"""Hugging Face checkpoints of Granite and its mixtures of experts."""

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

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048, **dict.fromkeys(_SCALES.values(), 1.0),
}  # fmt: skip
_VOCABULARY = ("sentencepiece", "byte_fallback", "bpe")
_PRE = ("refact", "gpt-2")
_MOE, _SHARED = r"\.block_sparse_moe\.input_linear\.weight$", r"\.shared_mlp\.input_linear\.weight$"

CHECKPOINTS = (
    Checkpoint("granite", ("GraniteForCausalLM",), _KEYS, _DEFAULTS, _VOCABULARY, _PRE, convert=INTERLEAVED),
    Checkpoint(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        _KEYS | {"expert_shared_feed_forward_length": lambda fields: fields.get("shared_intermediate_size") or None},
        _DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}, _VOCABULARY, _PRE, convert=INTERLEAVED,
        split={
            _MOE: (".mlp.experts.gate_proj.weight", ".mlp.experts.up_proj.weight"),
            _SHARED: (".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight"),
        },
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

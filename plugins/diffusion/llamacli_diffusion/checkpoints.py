"""Hugging Face checkpoints of Dream and RND1."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, field, hookimpl

LLAMACLI_API = 1

CHECKPOINTS = (
    Checkpoint(
        "dream", ("DreamModel",), {"attention.causal": False, "pooling_type": field("pooling")},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        ("sentencepiece", "bpe"), ("qwen2",),
    ),
    Checkpoint(
        "rnd1", ("RND1",),
        {"expert_feed_forward_length": field("moe_intermediate_size"), "attention.causal": False}, pre=("qwen2",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

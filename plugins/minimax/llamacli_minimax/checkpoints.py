"""Hugging Face checkpoints of MiniMax-M2."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, field, hookimpl

LLAMACLI_API = 1

CHECKPOINTS = (
    Checkpoint(
        "minimax-m2", ("MiniMaxM2ForCausalLM",),
        {"expert_feed_forward_length": field("intermediate_size"), "rope.dimension_count": field("rotary_dim")},
        {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 256,
         "num_experts_per_tok": 8, "scoring_func": "sigmoid", "rotary_dim": 64},
        pre=("minimax-m2", "qwen2"), drop=(r"\.mtp_",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

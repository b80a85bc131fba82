"""Hugging Face checkpoints of dots.llm1."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, field, hookimpl

LLAMACLI_API = 1

CHECKPOINTS = (
    Checkpoint(
        "dots1", ("Dots1ForCausalLM",),
        {
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "leading_dense_block_count": field("first_k_dense_replace"),
            "expert_shared_count": field("n_shared_experts"),
            "expert_weights_scale": field("routed_scaling_factor", kind=float),
            "expert_weights_norm": field("norm_topk_prob", kind=bool),
        },
        {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 128, "max_position_embeddings": 2048},
        pre=("dots1", "qwen2"),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

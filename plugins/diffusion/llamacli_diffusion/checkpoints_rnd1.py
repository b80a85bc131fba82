"""Hugging Face checkpoints of RND1."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, field, hookimpl

LLAMACLI_API = 1


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layout."""
    register(
        Checkpoint(
            "rnd1",
            ("RND1",),
            {"expert_feed_forward_length": field("moe_intermediate_size"), "attention.causal": False},
            pre=("qwen2",),
        )
    )

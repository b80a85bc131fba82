"""Hugging Face checkpoints of gpt-oss, with experts in MXFP4 or bfloat16."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import TRANSPOSED, Checkpoint, field, hookimpl

LLAMACLI_API = 1

_KEYS: dict[str, Any] = {
    "attention.sliding_window": field("sliding_window"), "expert_feed_forward_length": field("intermediate_size"),
}  # fmt: skip

CHECKPOINT = Checkpoint(
    "gpt-oss", ("GptOssForCausalLM",), _KEYS,
    {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
     "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
    pre=("gpt-4o",),
    rename=(
        (r"\.sinks$", ".sinks.weight"),
        (r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),
        (r"(\.experts\.(?:down|gate_up)_proj)_bias$", r"\1.bias"),
    ),
    split={r"\.experts\.gate_up_proj\.": (".experts.gate_proj.", ".experts.up_proj.")}, mixed=True,
    convert={f"ffn_{name}_exps.weight": TRANSPOSED for name in ("gate", "up", "down")},
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layout."""
    register(CHECKPOINT)

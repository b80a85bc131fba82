"""Hugging Face checkpoints of gpt-oss, with experts in MXFP4 or bfloat16."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Conversion, Settings, hookimpl

LLAMACLI_API = 1

_TRANSPOSED = Conversion(
    lambda array, settings: array.swapaxes(-1, -2), lambda shape, settings: (*shape[:-2], shape[-1], shape[-2])
)
"""Experts that are stored with a row for each input; those in MXFP4 are not."""

_KEYS: dict[str, Any] = {
    "attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size",
}  # fmt: skip


def _field(name: str) -> Callable[[Settings], int]:
    return lambda settings: int(settings[name])


CHECKPOINT = Checkpoint(
    "gpt-oss", ("GptOssForCausalLM",), {key: _field(name) for key, name in _KEYS.items()},
    {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
     "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
    pre=("gpt-4o",),
    rename=(
        (r"\.sinks$", ".sinks.weight"),
        (r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),
        (r"(\.experts\.(?:down|gate_up)_proj)_bias$", r"\1.bias"),
    ),
    split={r"\.experts\.gate_up_proj\.": (".experts.gate_proj.", ".experts.up_proj.")}, mixed=True,
    convert={f"ffn_{name}_exps.weight": _TRANSPOSED for name in ("gate", "up", "down")},
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layout."""
    register(CHECKPOINT)

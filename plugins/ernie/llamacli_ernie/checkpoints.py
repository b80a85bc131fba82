"""Hugging Face checkpoints of ERNIE 4.5 and PaddleOCR-VL."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl

LLAMACLI_API = 1


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    added = tokenizer.get("add_prefix_space")
    return {} if added is None else {"tokenizer.ggml.add_space_prefix": bool(added)}


def _shared_width(settings: Settings) -> int | None:
    if not settings.get("moe_num_shared_experts"):
        return None
    return int(settings["intermediate_size"] // settings["num_key_value_heads"])


_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128,
    "rope_theta": 500000.0,
}  # fmt: skip
_RENAME = ((r"^ernie\.", "model."),)

CHECKPOINTS = (
    Checkpoint(
        "ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), {}, _DEFAULTS, ("sentencepiece",),
        tokenizer=_space_prefix, rename=_RENAME,
    ),
    Checkpoint(
        "paddleocr", ("PaddleOCRVLForConditionalGeneration",), {}, _DEFAULTS, ("sentencepiece",),
        tokenizer=_space_prefix, rename=_RENAME,
    ),
    Checkpoint(
        "ernie4_5-moe", ("Ernie4_5_MoeForCausalLM",),
        {
            "expert_count": field("moe_num_experts"), "expert_used_count": field("moe_k"),
            "interleave_moe_layer_step": field("moe_layer_interval"),
            "leading_dense_block_count": field("moe_layer_start_index"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_count": field("moe_num_shared_experts"),
            "expert_shared_feed_forward_length": _shared_width,
        },
        _DEFAULTS | {"moe_layer_interval": 1, "moe_k": 6, "moe_num_experts": 64, "moe_layer_start_index": 1,
                     "num_key_value_heads": 4, "head_dim": None},
        ("sentencepiece",), tokenizer=_space_prefix, rename=_RENAME, drop=(r"^model\.mtp_",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

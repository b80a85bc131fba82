"""Hugging Face checkpoints of LLaDA, LLaDA-MoE, Dream and RND1."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, field, head_dim, hookimpl

LLAMACLI_API = 1

_LLADA_MOE_MASK = 156895
_UNSHIFTED = {"diffusion.shift_logits": False}


def _beginning(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return _UNSHIFTED | {"tokenizer.ggml.add_bos_token": True}


def _mask(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return _UNSHIFTED | ({} if tokenizer.get("mask_token") else {"tokenizer.ggml.mask_token_id": _LLADA_MOE_MASK})


CHECKPOINTS = (
    Checkpoint(
        "llada", ("LLaDAModelLM",),
        {
            "attention.causal": False, "pooling_type": field("pooling"), "vocab_size": field("vocab_size"),
            "context_length": field("max_sequence_length"), "feed_forward_length": field("mlp_hidden_size"),
            "rope.dimension_count": head_dim,
        },
        {"num_attention_heads": field("n_heads"), "num_key_value_heads": field("n_kv_heads"), "hidden_size":
         field("d_model"), "max_sequence_length": 4096, "mlp_hidden_size": 12288},
        pre=("llada-moe",), tokenizer=_beginning, convert=INTERLEAVED,
    ),
    Checkpoint(
        "llada-moe", ("LLaDAMoEModelLM", "LLaDAMoEModel"),
        {"expert_feed_forward_length": field("expert_intermediate_size"), "attention.causal": False},
        pre=("llada-moe",), tokenizer=_mask,
    ),
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

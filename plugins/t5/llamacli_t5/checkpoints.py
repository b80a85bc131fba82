"""Hugging Face checkpoints of T5, mT5, UMT5 and of T5's encoder."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import Checkpoint, Settings, field, hookimpl

LLAMACLI_API = 1

_TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of the table of embeddings, of which a folder may have several."""


def _first(settings: Settings) -> str:
    return next((name for name in settings["tensor_names"] if name in _TABLES), _TABLES[0])


def _others(settings: Settings) -> tuple[str, ...]:
    return tuple(f"^{name}$" for name in _TABLES if name != _first(settings))


def _shared(settings: Settings) -> tuple[tuple[str, str], ...]:
    return ((f"^{_first(settings)}$", "shared.weight"),)


_KEYS: dict[str, Any] = {
    "context_length": lambda settings: int(settings.get("n_positions") or 512), "embedding_length": field("d_model"),
    "feed_forward_length": field("d_ff"), "attention.head_count": field("num_heads"),
    "attention.key_length": field("d_kv"), "attention.value_length": field("d_kv"),
    "attention.layer_norm_rms_epsilon": field("layer_norm_epsilon", kind=float),
    "attention.relative_buckets_count": field("relative_attention_num_buckets"),
}  # fmt: skip
_ENCODER = Checkpoint(
    "t5encoder", ("T5EncoderModel",), _KEYS, {"layer_norm_epsilon": 1e-6, "relative_attention_num_buckets": 32},
    ("unigram",), drop=_others, rename=_shared,
)  # fmt: skip
CHECKPOINTS = (
    _ENCODER,
    attrs.evolve(
        _ENCODER, architecture="t5", classes=(
            "T5ForConditionalGeneration", "T5WithLMHeadModel", "MT5ForConditionalGeneration",
            "UMT5ForConditionalGeneration", "UMT5Model",
        ),
        keys=_KEYS | {
            "decoder_block_count": field("num_decoder_layers"),
            "decoder_start_token_id": lambda settings: int(settings["decoder_start_token_id"]),
        },
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

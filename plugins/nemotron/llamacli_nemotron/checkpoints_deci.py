"""Hugging Face checkpoints of Llama-Nemotron and DeciLM."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Conversion, Settings, field, head_dim, hookimpl, wavelength_factors

LLAMACLI_API = 1


def _interleaved(array: Any, settings: Settings) -> Any:
    """Rows for RoPE that rotates pairs, of any number of heads."""
    return array.reshape(-1, 2, head_dim(settings) // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _heads(block: Settings, settings: Settings) -> tuple[int, int]:
    """Heads of queries, and of keys and values; 0 without attention."""
    attention, n_head = block["attention"], int(settings["num_attention_heads"])
    if (n_group := attention["n_heads_in_group"]) is not None:
        return n_head, n_head // n_group
    return (n_head if attention["replace_with_linear"] is True else 0), 0


def _width(block: Settings, settings: Settings) -> int:
    """Width of a block's network, a multiple of 256."""
    return -(-int(2 * (block["ffn"]["ffn_mult"] or 0.0) * settings["hidden_size"] / 3) // 256) * 256


def _by_block(value: Callable[[Settings, Settings], int], *names: str) -> Callable[[Settings], Any]:
    """Numbers by `block_configs`; without them the value of a field."""

    def found(settings: Settings) -> Any:
        if (blocks := settings.get("block_configs")) is not None:
            return [value(block, settings) for block in blocks]
        given = next((settings[name] for name in names if settings.get(name) is not None), None)
        return [int(n) for n in given] if isinstance(given, list) else given

    return found


def _head_width(settings: Settings) -> int | None:
    """Width of a head; None for folders that name none."""
    if settings.get("block_configs") is None:
        return settings.get("head_dim")
    return int(settings["hidden_size"] // settings["num_attention_heads"])


_ROTATED = Conversion(_interleaved)

CHECKPOINTS = (
    Checkpoint(
        "deci", ("DeciLMForCausalLM",),
        {
            "vocab_size": field("vocab_size"), "rope.dimension_count": head_dim,
            "attention.head_count": _by_block(lambda *given: _heads(*given)[0], "num_attention_heads"),
            "attention.head_count_kv": _by_block(
                lambda *given: _heads(*given)[1], "num_key_value_heads_per_layer", "num_key_value_heads"
            ),
            "feed_forward_length": _by_block(_width, "intermediate_size"),
            "attention.key_length": _head_width, "attention.value_length": _head_width,
        },
        vocabulary=("byte_fallback", "bpe"), pre=("llama-bpe",),
        convert={f"attn_{name}.{kind}": _ROTATED for name in "qk" for kind in ("weight", "bias")},
        extra=wavelength_factors("llama3"),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

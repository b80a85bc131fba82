"""Hugging Face checkpoints of LFM2 and its mixtures of experts."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import SQUEEZED, Checkpoint, Settings, field, hookimpl

LLAMACLI_API = 1


def _kv_heads(settings: Settings) -> list[int]:
    """Heads of keys and values by layer, none beside a convolution."""
    n_head_kv = int(settings["num_key_value_heads"])
    return [0 if kind == "conv" else n_head_kv for kind in settings["layer_types"]]


def _width(settings: Settings) -> int:
    n_ff = int(settings.get("block_ff_dim") or settings["intermediate_size"])
    if not settings["block_auto_adjust_ff_dim"]:
        return n_ff
    n_ff, step = int(2 * n_ff / 3), int(settings["block_multiple_of"])
    if (multiplier := settings["block_ffn_dim_multiplier"]) is not None:
        n_ff = int(multiplier * n_ff)
    return step * (-(-n_ff // step))


def _output_width(settings: Settings) -> None:
    if "Dense" in settings["modules"]:
        raise ValueError("the layer Dense of modules.json is not read; take a GGUF file of the model")


_KEYS: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "shortconv.l_cache": field("conv_L_cache"), "attention.head_count_kv": _kv_heads,
    "attention.layer_norm_rms_epsilon": field("norm_eps", kind=float),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {"norm_eps": 1e-5, "conv_L_cache": 3, "rope_theta": 1e6, "max_position_embeddings": 128000}
_CONVERT = {"shortconv.conv.weight": SQUEEZED}
_PRE = ("lfm2", "llama-bpe")

_LFM2 = Checkpoint(
    "lfm2", ("Lfm2ForCausalLM", "LFM2ForCausalLM"), _KEYS | {"feed_forward_length": _width},
    _DEFAULTS | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
    pre=_PRE, convert=_CONVERT,
)  # fmt: skip

_EMBEDDING = attrs.evolve(
    _LFM2, classes=("Lfm2Model",), rename=((r"^", "model."),),
    keys={**_LFM2.keys, "pooling_type": field("pooling"), "embedding_length_out": _output_width},
)  # fmt: skip

CHECKPOINTS = (
    _LFM2,
    _EMBEDDING,
    attrs.evolve(
        _EMBEDDING, classes=("Lfm2BidirectionalModel",), keys={**_EMBEDDING.keys, "attention.causal": False}
    ),
    attrs.evolve(
        _LFM2, classes=("Lfm25AudioTokenizer",), vocabulary=("none",), rename=((r"^lfm\.", "model."),),
        drop=(r"^istft\.window$", r"^emb\.emb"), tensors={"lin": "dense_2"},
        keys={
            **_LFM2.keys, "attention.sliding_window": field("sliding_window"),
            "embedding_length_out": field("output_size"),
        },
    ),
    Checkpoint(
        "lfm2moe", ("Lfm2MoeForCausalLM",),
        _KEYS | {
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "leading_dense_block_count": field("num_dense_layers"), "expert_gating_func": 2,
        },
        _DEFAULTS | {"num_experts": 32, "num_experts_per_tok": 4}, pre=_PRE, convert=_CONVERT,
        rename=((r"\.expert_bias$", ".expert_bias.bias"), (r"^model\.(.*\.experts\.)", r"\1")),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

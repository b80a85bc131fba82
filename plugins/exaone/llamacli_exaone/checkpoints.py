"""Hugging Face checkpoints of EXAONE 3, 4 and K-EXAONE."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Settings, field, hookimpl, n_blocks, rope_of, wavelength_factors

LLAMACLI_API = 1


def _pattern(settings: Settings) -> list[bool] | None:
    if settings.get("sliding_window") is None:
        return None
    if kinds := settings.get("layer_types"):
        return [kind == "sliding_attention" for kind in kinds]
    pattern: Any = settings.get("sliding_window_pattern")
    layers = range(settings["num_hidden_layers"])
    if isinstance(pattern, int):
        return [(i + 1) % pattern != 0 for i in layers]
    return [pattern[i % len(pattern)] == "L" for i in layers] if pattern else None


def _predicting(settings: Settings) -> int:
    """Number of blocks for multi-token prediction."""
    return int(settings.get("num_nextn_predict_layers") or 0)


_PREDICTION = {
    r"^mtp\.fc\.": "eh_proj.", r"^mtp\.pre_fc_norm_embedding\.": "enorm.", r"^mtp\.pre_fc_norm_hidden\.": "hnorm.",
    r"^mtp\.norm\.": "shared_head.norm.", r"^mtp\.layers\.0\.": "",
}  # fmt: skip


def _names(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Names of the block behind the others, which predicts."""
    return tuple(
        (pattern, f"model.layers.{settings['num_hidden_layers']}.{name}") for pattern, name in _PREDICTION.items()
    )


def _left_out(settings: Settings) -> tuple[str, ...]:
    return () if _predicting(settings) else (r"^mtp\.",)


def _rope_dims(settings: Settings) -> int:
    share = rope_of(settings).get("partial_rotary_factor")
    return int((1.0 if share is None else share) * (settings["hidden_size"] // settings["num_attention_heads"]))


_KEYS: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "attention.sliding_window": field("sliding_window"),
    "attention.sliding_window_pattern": _pattern,
}  # fmt: skip
_PREDICTION_KEYS: dict[str, Any] = {
    "block_count": n_blocks,
    "nextn_predict_layers": lambda settings: _predicting(settings) or None,
}
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "head_dim": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
}  # fmt: skip
_PRE = ("exaone4", "gpt-2")

CHECKPOINTS = (
    Checkpoint(
        "exaone", ("ExaoneForCausalLM",),
        {"rope.dimension_count": _rope_dims,
         "attention.layer_norm_rms_epsilon": field("layer_norm_epsilon", kind=float)},
        {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "rope_theta": 10000.0,
         "num_key_value_heads": lambda settings: settings["num_attention_heads"]},
        pre=("exaone",), extra=wavelength_factors("llama3"),
    ),
    Checkpoint(
        "exaone4", ("Exaone4ForCausalLM",), _KEYS, _DEFAULTS, pre=_PRE,
        extra=wavelength_factors("llama3", factor=16.0),
    ),
    Checkpoint(
        "exaone4", ("Exaone4_5_ForConditionalGeneration",), _KEYS | _PREDICTION_KEYS, _DEFAULTS, pre=_PRE,
        drop=_left_out, rename=_names,
        tensors={f"model.layers.{{}}.{name}": f"blk.{{}}.nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")}
        | {"model.layers.{}.shared_head.norm": "blk.{}.nextn.shared_head_norm"},
        extra=wavelength_factors("llama3", factor=16.0),
    ),
    Checkpoint(
        "exaone-moe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        _KEYS | _PREDICTION_KEYS | {
            "nextn_predict_layers": _predicting,
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_count": field("num_shared_experts"),
            "expert_shared_feed_forward_length":
            lambda settings: settings["moe_intermediate_size"] * settings["num_shared_experts"],
            "expert_weights_scale": field("routed_scaling_factor", kind=float),
            "expert_weights_norm": field("norm_topk_prob", kind=bool),
            "leading_dense_block_count":
            lambda settings: field("first_k_dense_replace", "first_last_k_dense_replace")(settings) or 0,
            "rope.scaling.type": "none",
        },
        _DEFAULTS, pre=("exaone-moe",), drop=_left_out, rename=_names,
        extra=wavelength_factors("llama3", factor=16.0),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

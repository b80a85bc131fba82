"""Hugging Face checkpoints of MiMo-V2 and Step 3.5, mixtures with sliding windows."""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llamacli.plugin import PLUS_ONE, Checkpoint, Settings, field, hookimpl, n_blocks, rope_of, wavelength_factors

LLAMACLI_API = 1

_HEAD = {name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")} | {
    f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("head", "norm")
}
_PREDICTING = {f"model.layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in _HEAD.items()}
"""Names of tensors of blocks for multi-token prediction."""


# --- MiMo-V2 ---


def _n_mtp(settings: Settings) -> int:
    """Blocks for multi-token prediction that the folder has."""
    found = (re.match(r"model\.mtp\.layers\.(\d+)\.", name) for name in settings["tensor_names"])
    return len({match[1] for match in found if match})


def _windows(settings: Settings) -> list[int]:
    """1 for layers with windows, which blocks for prediction are."""
    return [*settings["hybrid_layer_pattern"]] + [1] * _n_mtp(settings)


def _kv_heads(settings: Settings) -> list[int]:
    counts = settings["num_key_value_heads"], settings["swa_num_key_value_heads"]
    return [counts[kind == 1] for kind in _windows(settings)]


def _mimo_names(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Renamings.

    ValueError for float8 with scales of several machines' parts, and for MXFP4.
    """
    if any(name.endswith(".qkv_proj.weight_scale_inv") for name in settings["tensor_names"]):
        raise ValueError("qkv_proj.weight_scale_inv has blocks of parts of the matrix, which are not read")
    if (settings.get("quantization_config") or {}).get("store_dtype") == "mxfp4":
        raise ValueError("quantization_config.store_dtype is mxfp4, whose experts are not read")
    last = settings["num_hidden_layers"]
    moved = ((rf"^model\.mtp\.layers\.{i}\.", f"model.layers.{last + i}.") for i in range(_n_mtp(settings)))
    return (*moved, (r"\.attention_sink_bias$", ".attention_sink_bias.weight"))


# --- Step 3.5 ---


def _is_sliding(settings: Settings) -> list[bool]:
    """Kinds of layers; ValueError where they rotate other shares of heads."""
    kinds = [*(settings.get("layer_types") or ()), *["full_attention"] * n_blocks(settings)][: n_blocks(settings)]
    found = [kind == "sliding_attention" for kind in kinds]
    shares = settings.get("partial_rotary_factors") or ()
    if any(share != (1.0 if sliding else 0.5) for share, sliding in zip(shares, found, strict=False)):
        raise ValueError("partial_rotary_factors are not 1 of layers with windows and 0.5 of others")
    return found


def _heads(name: str) -> Callable[[Settings], list[int]]:
    def by_layer(settings: Settings) -> list[int]:
        counts = dict(settings) | (settings.get("attention_other_setting") or {})
        return [int((counts if is_sliding else settings)[name]) for is_sliding in _is_sliding(settings)]

    return by_layer


def _limits(name: str) -> Callable[[Settings], list[float] | None]:
    def by_layer(settings: Settings) -> list[float] | None:
        if (limits := settings.get(name)) is None:
            return None
        return [float(limit or 0) for limit in [*limits, *[0] * n_blocks(settings)][: n_blocks(settings)]]

    return by_layer


def _n_dense(settings: Settings) -> int:
    listed = str(settings.get("moe_layers_enum") or "").strip()
    return min(map(int, listed.split(","))) if listed else 0


def _sliding_theta(settings: Settings) -> float | None:
    theta = settings.get("rope_theta")
    return float(theta[1]) if isinstance(theta, list) else None


def _half_factors(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    """Factors of the half of a head that is rotated, then ones."""
    width = int(settings["head_dim"])
    half = wavelength_factors("llama3")({**settings, "head_dim": width // 2})
    return {name: np.pad(found, (0, width // 2 - len(found)), constant_values=1) for name, found in half.items()}


_NORMS = (
    "attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "output_norm", "nextn.enorm", "nextn.hnorm",
    "nextn.shared_head_norm",
)  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "mimo2", ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        {
            "block_count": lambda settings: settings["num_hidden_layers"] + _n_mtp(settings),
            "nextn_predict_layers": lambda settings: _n_mtp(settings) or None,
            "attention.head_count_kv": _kv_heads, "attention.sliding_window": field("sliding_window"),
            "attention.sliding_window_pattern": _windows, "attention.value_length": field("v_head_dim"),
            "attention.value_scale": field("attention_value_scale", kind=float),
            "attention.layer_norm_rms_epsilon": field("layernorm_epsilon", kind=float),
            "expert_count": field("n_routed_experts"), "expert_feed_forward_length": field("moe_intermediate_size"),
            "rope.dimension_count": lambda settings: int(
                settings["head_dim"] * rope_of(settings)["partial_rotary_factor"]
            ),
        },
        {"layernorm_epsilon": 1e-5}, pre=("qwen2",), rename=_mimo_names,
        tensors=_PREDICTING | {
            "model.layers.{}.pre_mlp_layernorm": "blk.{}.ffn_norm",
            "model.layers.{}.final_layernorm": "blk.{}.layer_output_norm",
        },
    ),
    Checkpoint(
        "step35", ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        {
            "block_count": n_blocks, "nextn_predict_layers": field("num_nextn_predict_layers"),
            "attention.head_count": _heads("num_attention_heads"),
            "attention.head_count_kv": _heads("num_attention_groups"),
            "attention.sliding_window": field("sliding_window"), "attention.sliding_window_pattern": _is_sliding,
            "expert_count": field("moe_num_experts"), "expert_used_count": field("moe_top_k"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_feed_forward_length": field("share_expert_dim"),
            "expert_weights_scale": field("moe_router_scaling_factor", kind=float),
            "expert_weights_norm": field("norm_expert_weight", kind=bool),
            "leading_dense_block_count": _n_dense,
            "moe_every_n_layers": lambda settings: int(settings.get("moe_every_n_layer", 1)),
            "swiglu_clamp_exp": _limits("swiglu_limits"), "swiglu_clamp_shexp": _limits("swiglu_limits_shared"),
            "rope.freq_base_swa": _sliding_theta,
        },
        {"rms_norm_eps": 1e-5}, pre=("deepseek-v3",), extra=_half_factors, tensors=_PREDICTING,
        rename=(
            (r"\.moe\.router_bias$", ".moe.router_bias.bias"), (r"\.transformer\.shared_head\.", ".shared_head."),
            (r"\.shared_head\.output\.", ".shared_head.head."),
        ),
        convert={f"{name}.weight": PLUS_ONE for name in _NORMS},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

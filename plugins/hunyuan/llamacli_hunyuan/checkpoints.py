"""Hugging Face checkpoints of Hunyuan: dense, A13B, VL's text and Hunyuan 3."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import Checkpoint, Settings, field, head_dim, hookimpl, n_blocks, rope_of

LLAMACLI_API = 1

_LONG = 256 * 1024
"""Context length with dynamic RoPE; that of config.json is too small."""
_A13B_BOS = 127959


def _dynamic(value: Callable[[Settings], Any] | Any, other: Callable[[Settings], Any] | None = None) -> Any:
    """Value with dynamic RoPE, and that of another function without."""

    def found(settings: Settings) -> Any:
        if rope_of(settings).get("rope_type") == "dynamic":
            return value(settings) if callable(value) else value
        return other(settings) if other else None

    return found


def _base(settings: Settings) -> float:
    rope, dim = rope_of(settings), head_dim(settings)
    return float(rope.get("rope_theta", 10000.0) * rope.get("alpha", 50) ** (dim / (dim - 2)))


def _end(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    end, ends = settings.get("eod_token_id"), settings["generation"].get("eos_token_id")
    found: dict[str, Any] = {} if end is None else {"tokenizer.ggml.eos_token_id": int(end)}
    found |= {"tokenizer.ggml.eot_token_id": ends[0]} if isinstance(ends, list) and len(ends) > 1 else {}
    return found | ({"tokenizer.ggml.padding_token_id": None} if (settings.get("pad_token_id") or 0) < 0 else {})


def _sections(settings: Settings) -> list[int]:
    """Dimensions of RoPE by axes; transformers 5 calls it dynamic."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    return list(rope["xdrope_section"] if kind == "xdrope" else rope.get("mrope_section", ()))


def _of_all(name: str) -> Callable[[Settings], int]:
    """Number that all layers have."""

    def number(settings: Settings) -> int:
        found = settings[name]
        if len(set(found)) != 1:
            raise ValueError(f"{name} is {found}, expected one number for all layers")
        return int(found[0])

    return number


def _begin(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Token at the beginning, which config.json has wrong."""
    return {"tokenizer.ggml.bos_token_id": _A13B_BOS} if settings["vocab_size"] > _A13B_BOS else {}


_DENSE = Checkpoint(
    "hunyuan-dense", ("HunYuanDenseV1ForCausalLM",),
    {
        "rope.freq_base": _dynamic(_base, lambda settings: float(rope_of(settings)["rope_theta"])),
        "rope.scaling.type": _dynamic("none"), "rope.scaling.factor": _dynamic(1.0),
        "rope.scaling.original_context_length": _dynamic(_LONG),
        "context_length": _dynamic(_LONG, field("max_position_embeddings")), "expert_count": None,
    },
    {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
     "head_dim": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
     "num_key_value_heads": lambda settings: settings["num_attention_heads"]},
    pre=("hunyuan-dense", "hunyuan", "qwen2"), tokenizer=_end,
    drop=lambda settings: (r"^lm_head\.",) if settings.get("tie_word_embeddings") else (),
)  # fmt: skip
_PICTURES = attrs.evolve(_DENSE, architecture="hunyuan_vl", classes=("HunYuanVLForConditionalGeneration",))
_SECTIONED = attrs.evolve(
    _PICTURES,
    keys=dict(_DENSE.keys) | {
        "rope.freq_base": lambda settings: float(rope_of(settings)["rope_theta"]),
        "rope.scaling.alpha": lambda settings: float(rope_of(settings)["alpha"]),
        "rope.scaling.type": "none",
        "rope.scaling.factor": lambda settings: float(rope_of(settings).get("factor", 1)),
        "rope.scaling.original_context_length": field("max_position_embeddings"),
        "context_length": field("max_position_embeddings"),
        "rope.dimension_sections": _sections,
    },
)  # fmt: skip

CHECKPOINTS = (
    _DENSE,
    Checkpoint(
        "hunyuan-moe", ("HunYuanMoEV1ForCausalLM",),
        {key: value for key, value in _DENSE.keys.items() if key != "expert_count"} | {
            "expert_shared_feed_forward_length": field("intermediate_size"),
            "expert_feed_forward_length": _of_all("moe_intermediate_size"), "expert_used_count": _of_all("moe_topk"),
            "expert_shared_count": _of_all("num_shared_expert"),
        },
        {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}, pre=("hunyuan", "qwen2"), tokenizer=_begin, drop=_DENSE.drop,
    ),
    attrs.evolve(_PICTURES, variant=lambda settings: _SECTIONED if _sections(settings) else _PICTURES),
    Checkpoint(
        "hy_v3", ("HYV3ForCausalLM",),
        {
            "block_count": n_blocks,
            "nextn_predict_layers": lambda settings: settings.get("num_nextn_predict_layers") or None,
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_feed_forward_length":
            lambda settings: settings["moe_intermediate_size"] * settings["num_shared_experts"],
            "expert_weights_norm": field("route_norm", kind=bool),
            "expert_weights_scale": field("router_scaling_factor", kind=float), "expert_gating_func": 2,
        },
        {"num_shared_experts": 1, "route_norm": True, "router_scaling_factor": 1.0},
        pre=("hy_v4", "hunyuan-dense"), rename=((r"\.final_layernorm\.", ".shared_head.norm."),), names="exaone-moe",
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

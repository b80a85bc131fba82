"""Hugging Face checkpoints of Ling, Sarvam and GroveMoE."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from llamacli.plugin import INTERLEAVED, Checkpoint, Conversion, Settings, field, head_dim, hookimpl, n_blocks, rope_of

LLAMACLI_API = 1

Shape = tuple[int, ...]


def _part(name: str, i: int) -> Conversion:
    """Queries, keys or values of one matrix, ordered as by `INTERLEAVED`."""

    def rows(shape: Shape, settings: Settings) -> slice:
        n_head, n_head_kv, width = settings["num_attention_heads"], settings["num_key_value_heads"], head_dim(settings)
        ends = np.cumsum([0, n_head * width, n_head_kv * width, n_head_kv * width]).tolist()
        if shape[0] != ends[-1]:
            raise ValueError(f"shape {shape}, expected {ends[-1]} rows")
        return slice(ends[i], ends[i + 1])

    def shape(shape: Shape, settings: Settings) -> Shape:
        found = rows(shape, settings)
        return found.stop - found.start, *shape[1:]

    def apply(array: Any, settings: Settings) -> Any:
        part = array[rows(array.shape, settings)]
        return INTERLEAVED[name].apply(part, settings) if name in INTERLEAVED else part

    return Conversion(apply, shape)


def _normalized(array: Any, settings: Settings) -> Any:
    """Output matrix, whose columns have the length 1 with `norm_head`."""
    return array / (np.linalg.norm(array, axis=0, keepdims=True) + 1e-7) if settings.get("norm_head") else array


def _rope_dims(settings: Settings) -> int:
    return int(head_dim(settings) * rope_of(settings).get("partial_rotary_factor", 0.5))


_KEYS: dict[str, Any] = {
    "rope.dimension_count": head_dim, "leading_dense_block_count": field("first_k_dense_replace"),
    "vocab_size": field("vocab_size"), "expert_feed_forward_length": field("moe_intermediate_size"),
    "expert_shared_count": field("num_shared_experts"), "expert_weights_norm": field("norm_topk_prob", kind=bool),
}  # fmt: skip

_SECOND = Checkpoint(
    "bailingmoe2", ("BailingMoeV2ForCausalLM",),
    _KEYS | {
        "block_count": n_blocks,
        "nextn_predict_layers": field("num_nextn_predict_layers"), "rope.dimension_count": _rope_dims,
        "expert_shared_feed_forward_length": lambda settings: settings.get("moe_shared_expert_intermediate_size")
        or settings["moe_intermediate_size"] * settings["num_shared_experts"],
        "expert_weights_scale": field("routed_scaling_factor", kind=float),
    },
    pre=("bailingmoe2",), rename=((r"\.expert_bias$", ".expert_bias.bias"),),
)  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "bailingmoe", ("BailingMoeForCausalLM",), _KEYS | {"expert_weights_scale": 1.0}, pre=("bailingmoe",),
        rename=((r"\.attention\.dense\.", ".self_attn.o_proj."),),
        whole={r"\.attention\.query_key_value\.":
               (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")},
        convert={f"attn_{name}.weight": _part(f"attn_{name}.weight", i) for i, name in enumerate("qkv")}
        | {"output.weight": Conversion(_normalized, computes=True)},
    ),
    _SECOND,
    attrs.evolve(
        _SECOND, classes=("SarvamMoEForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
        keys=dict(_SECOND.keys) | {"rope.dimension_count": head_dim}, pre=("sarvam-moe",),
        convert={"exp_probs_b.bias": Conversion(lambda array, settings: array - array.mean(), computes=True)},
    ),
    Checkpoint(
        "grovemoe", ("GroveMoeForCausalLM", "modeling_grove_moe.GroveMoeForCausalLM"),
        {
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_chunk_feed_forward_length": lambda settings: settings.get("head_dim") or 128,
            "experts_per_group": 2, "expert_group_scale": 0.05,
        },
        pre=("qwen2",), drop=(r"\.expert_bias$",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Nemotron-4, Minitron, Nemotron-H, Nemotron 3 and its Puzzle."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import INTERLEAVED, PLUS_ONE, Checkpoint, Settings, field, hookimpl, rope_of, state_space

LLAMACLI_API = 1


def _rope_dims(settings: Settings) -> int:
    width = int(rope_of(settings)["partial_rotary_factor"] * settings["hidden_size"])
    return int(width // settings["num_attention_heads"])


def _factor(settings: Settings) -> float | None:
    factor = settings.get("factor") or rope_of(settings).get("factor")
    return None if factor is None else float(factor)


def _special(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 1}


_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


def _kinds(settings: Settings) -> list[str]:
    """Layers: M for Mamba-2, * for attention, E for experts, - for a network."""
    if "block_configs" in settings:
        pattern = [block["block_type"] for block in settings["block_configs"]]
    else:
        pattern = settings.get("hybrid_override_pattern") or settings["layers_block_type"]
    return [_LETTERS.get(kind, kind) for kind in pattern]


def _by_layer(field_name: str, letters: str) -> Callable[[Settings], list[int]]:
    return lambda settings: [settings[field_name] if kind in letters else 0 for kind in _kinds(settings)]


def _of_blocks(name: str) -> Callable[[Settings], list[int]]:
    return lambda settings: [int(block.get(name) or 0) for block in settings["block_configs"]]


_HYBRID_KEYS: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "context_length": 2**20, "rope.scaling.finetuned": False,
    "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
    "attention.head_count_kv": _by_layer("num_key_value_heads", "*"),
    "ssm.conv_kernel": field("conv_kernel"), "ssm.state_size": field("ssm_state_size"),
    "ssm.group_count": field("n_groups"), "ssm.time_step_rank": field("mamba_num_heads"),
    "ssm.inner_size": lambda settings: settings["mamba_num_heads"] * settings["mamba_head_dim"],
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "defaults": {
        "num_hidden_layers": lambda settings: len(_kinds(settings)), "layer_norm_epsilon": 1e-5, "rms_norm_eps":
        lambda settings: settings["layer_norm_epsilon"], "conv_kernel": 4, "ssm_state_size": 128, "n_groups": 8,
        "head_dim": lambda settings: settings.get("attention_head_dim", 128),
    },
    "pre": ("pixtral", "nemotron"),
    "rename": (
        (r"^model\.(layers\.\d+\.|embeddings|norm_f)", r"backbone.\1"), (r"\.dt_bias$", ".dt_proj.bias"),
        (r"^backbone\.(.*)\.mixer\.experts\.(\w+)$", r"model.\1.mlp.experts.\2.weight"),
        (r"^backbone\.(.*)\.mixer\.experts\.", r"model.\1.mlp.experts."),
    ),
    "convert": INTERLEAVED | state_space(lambda settings: int(settings["n_groups"])),
}  # fmt: skip
_DENSE = Checkpoint(
    "nemotron_h", (), _HYBRID_KEYS | {"feed_forward_length": _by_layer("intermediate_size", "-"), "expert_count": None,
                                      "expert_used_count": None, "expert_group_count": None,
                                      "expert_group_used_count": None}, **_HYBRID,
)  # fmt: skip


def _variant(settings: Settings) -> Checkpoint:
    return CHECKPOINTS[0] if "E" in _kinds(settings) else _DENSE


_MIXTURE_KEYS = _HYBRID_KEYS | {
    "expert_shared_feed_forward_length": field("moe_shared_expert_intermediate_size"),
    "expert_shared_count": field("n_shared_experts"), "expert_weights_norm": field("norm_topk_prob", kind=bool),
    "expert_weights_scale": field("routed_scaling_factor", kind=float), "moe_latent_size": field("moe_latent_size"),
}  # fmt: skip
CHECKPOINTS: tuple[Checkpoint, ...] = (
    Checkpoint(
        "nemotron_h_moe", ("NemotronHForCausalLM",),
        _MIXTURE_KEYS | {
            "feed_forward_length": _by_layer("moe_intermediate_size", "E"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
        },
        **_HYBRID, variant=_variant,
    ),
    Checkpoint(
        "nemotron_h_moe", ("NemotronHPuzzleForCausalLM",),
        _MIXTURE_KEYS | {
            "block_count": lambda settings: len(settings["block_configs"]),
            "feed_forward_length": _of_blocks("moe_intermediate_size"),
            "expert_feed_forward_length": _of_blocks("moe_intermediate_size"),
            "expert_used_count": _of_blocks("num_experts_per_tok"),
        },
        **_HYBRID, drop=(r"^mtp\.",),
    ),
    Checkpoint(
        "nemotron", ("NemotronForCausalLM",),
        {
            "vocab_size": field("vocab_size"), "rope.dimension_count": _rope_dims,
            "attention.layer_norm_epsilon": field("layer_norm_eps", "norm_eps", kind=float),
            "rope.scaling.type": lambda settings: "none" if _factor(settings) is None else "linear",
            "rope.scaling.factor": _factor,
        },
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
         "num_key_value_heads": lambda settings: settings["num_attention_heads"]},
        ("sentencepiece",), tokenizer=_special,
        convert=dict.fromkeys(("attn_norm.weight", "ffn_norm.weight", "output_norm.weight"), PLUS_ONE),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Granite, its mixtures, hybrids and adapters, and Bamba."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from llamacli.plugin import INTERLEAVED, Array, Checkpoint, Conversion, Settings, field, hookimpl, state_space

LLAMACLI_API = 1

_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def _scale(field: str) -> Callable[[Settings], float | None]:
    return lambda settings: float(settings[field]) if settings.get(field) else None


_KEYS: dict[str, Any] = {
    "vocab_size": lambda settings: settings["vocab_size"],
    "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
    "attention.key_length": None,
    "attention.value_length": None,
    **{key: _scale(field) for key, field in _SCALES.items()},
}

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 2048, **dict.fromkeys(_SCALES.values(), 1.0),
}  # fmt: skip
_VOCABULARY = ("sentencepiece", "byte_fallback", "bpe")
_PRE = ("refact", "gpt-2")
_MOE, _SHARED = r"\.block_sparse_moe\.input_linear\.weight$", r"\.shared_mlp\.input_linear\.weight$"

_GRANITE = Checkpoint("granite", ("GraniteForCausalLM",), _KEYS, _DEFAULTS, _VOCABULARY, _PRE, convert=INTERLEAVED)
_MIXTURE = Checkpoint(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        _KEYS | {"expert_shared_feed_forward_length": lambda fields: fields.get("shared_intermediate_size") or None},
        _DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}, _VOCABULARY, _PRE, convert=INTERLEAVED,
        split={
            _MOE: (".mlp.experts.gate_proj.weight", ".mlp.experts.up_proj.weight"),
            _SHARED: (".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight"),
        },
    )  # fmt: skip


def _kinds(settings: Settings) -> list[bool]:
    """Layers with attention."""
    return [kind in ("attention", "full_attention") for kind in settings["layer_types"]]


def _indexed(settings: Settings) -> list[str]:
    """Kinds of Bamba's layers, by the numbers of those with attention."""
    numbers = settings.get("attn_layer_indices") or ()
    return ["attention" if i in numbers else "mamba" for i in range(settings["num_hidden_layers"])]


def _rotated(settings: Settings) -> int:
    n_rotated = settings.get("attn_rotary_emb") or settings["hidden_size"] // settings["num_attention_heads"]
    return int(n_rotated)


def _rotated_rows(array: Any, settings: Settings) -> Any:
    """Rows of queries or keys of which RoPE turns a part."""
    head_dim, n_rotated = settings["hidden_size"] // settings["num_attention_heads"], _rotated(settings)
    heads = array.reshape(-1, head_dim, *array.shape[1:])
    rows = np.r_[np.arange(n_rotated).reshape(2, -1).T.ravel(), n_rotated:head_dim]
    return heads[:, rows].reshape(array.shape)


def _windowed(settings: Settings) -> list[bool]:
    """Layers with windows, three of four without a list."""
    kinds = settings.get("layer_types")
    return [kind == "sliding_attention" for kind in kinds] if kinds else [
        i % 4 != 0 for i in range(settings["num_hidden_layers"])
    ]  # fmt: skip


def _rotates(settings: Settings) -> list[bool] | None:
    """Layers with RoPE, None if all have it."""
    bases, theta = settings.get("layer_rope_theta") or (), settings["rope_parameters"]["rope_theta"]
    if {*bases} - {0, theta}:
        raise ValueError(f"layer_rope_theta is {list(bases)}, expected {theta}, or 0 without RoPE")
    rotates = [bool(base) for base in bases]
    return [bool(x) for x in settings.get("no_rope_layers") or ()] or (None if all(rotates) else rotates)


def _names(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Without experts, the shared one is the network."""
    if settings.get("num_local_experts"):
        return ((r"\.dt_bias$", ".dt_proj.bias"),)
    return (
        (r"\.dt_bias$", ".dt_proj.bias"), (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_linear."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    )  # fmt: skip


_DENSE = {r"\.mlp\.gate_up_linear\.weight$": (".mlp.gate_proj.weight", ".mlp.up_proj.weight")}
_USES_ROPE = {"rope.scaling.finetuned": True}
_HYBRID_KEYS: dict[str, Any] = {
    "attention.head_count_kv": lambda settings: [
        settings["num_key_value_heads"] if attends else 0 for attends in _kinds(settings)
    ],
    "ssm.conv_kernel": field("mamba_d_conv"), "ssm.state_size": field("mamba_d_state"),
    "ssm.group_count": field("mamba_n_groups"), "ssm.time_step_rank": field("mamba_n_heads"),
    "ssm.inner_size": lambda settings: settings["mamba_expand"] * settings["hidden_size"],
}  # fmt: skip


def _variant(settings: Settings) -> Checkpoint:
    """Granite Hybrid, or files of Granite where all layers have attention."""
    mixture = bool(settings.get("num_local_experts"))
    base = _MIXTURE if mixture else _GRANITE
    split = dict(_MIXTURE.split) | _DENSE
    if all(_kinds(settings)):
        return attrs.evolve(base, keys=dict(_MIXTURE.keys) | _HYBRID_KEYS | _USES_ROPE, rename=_names, split=split)
    return _HYBRID


_HYBRID = Checkpoint(
    "granitehybrid", ("GraniteMoeHybridForCausalLM",),
    dict(_MIXTURE.keys) | _HYBRID_KEYS | {"rope.scaling.finetuned": False, "context_length": 2**20},
    _DEFAULTS | {"rope_theta": None, "mamba_d_conv": 4, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_n_heads": 128,
                 "mamba_expand": 2, "pad_vocab_size_multiple": 8},
    ("bpe",), _PRE, rename=_names, split=dict(_MIXTURE.split) | _DENSE,
    convert=INTERLEAVED | state_space(lambda settings: int(settings["mamba_n_groups"])), variant=_variant,
)  # fmt: skip
_BAMBA = attrs.evolve(
    _HYBRID, classes=("BambaForCausalLM",), variant=None, vocabulary=_VOCABULARY,
    keys=_KEYS | _HYBRID_KEYS | _USES_ROPE | {"rope.dimension_count": _rotated},
    convert=dict(_HYBRID.convert) | dict.fromkeys(INTERLEAVED, Conversion(_rotated_rows)),
    defaults={**_HYBRID.defaults, **dict.fromkeys(_SCALES.values()), "rms_norm_eps": 1e-5, "rope_theta": 1e4,
              "max_position_embeddings": 262144, "layer_types": _indexed},
)  # fmt: skip
_SWA = Checkpoint(
    "granite_swa", ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
    dict(_MIXTURE.keys) | {
        "attention.sliding_window": lambda settings: int(settings.get("sliding_window", 128)),
        "attention.sliding_window_pattern": _windowed,
        "attention.rope_pattern": _rotates,
    },
    _DEFAULTS, _VOCABULARY, _PRE, names="granitehybrid", convert=INTERLEAVED,
    rename=(
        (r"\.sinks$", ".sinks.weight"), (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
        (r"\.experts\.down_proj$", ".output_linear.weight"),
    ),
    tensors={f"model.layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in (
        ("self_attn.sinks", "attn_sinks"), ("block_sparse_moe.router", "ffn_gate_inp"),
        ("block_sparse_moe.input_linear", "ffn_gate_up_exps"),
        ("shared_mlp.input_linear", "ffn_up_shexp"), ("shared_mlp.output_linear", "ffn_down_shexp"),
    )},
)  # fmt: skip


def _joined(array: Array, settings: Settings) -> Array:
    """Queries, keys and values; the first two for RoPE of pairs."""
    n_head, n_head_kv = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_dim = array.shape[0] // (n_head + 2 * n_head_kv)
    q, k, v = np.split(array, (n_head * head_dim, (n_head + n_head_kv) * head_dim))
    q, k = (INTERLEAVED[f"attn_{name}.weight"].apply(rows, settings) for name, rows in (("q", q), ("k", k)))
    return np.concatenate([q, k, v])


def _adapters(target: str) -> Conversion:
    """Matrices of adapters behind zeros, some for RoPE of pairs."""
    rotated = INTERLEAVED.get(target.replace(".lora_b", ".weight"))

    def apply(array: Array, settings: Settings) -> Array:
        found = [rotated.apply(rows, settings) if rotated else rows for rows in array[:, 0]]
        return np.stack([np.zeros_like(found[0]), *found])

    return Conversion(apply, lambda shape, settings: (shape[0] + 1, *shape[2:]))


_PARTS = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"), "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
}  # fmt: skip
_ADAPTED = {"self_attn.o_proj": "attn_output", "shared_mlp.output_linear": "ffn_down"}
_CHANGES = {
    f"{name}.lora_{side}_slices.{i}": f"{part}.lora_{side.lower()}"
    for name, parts in _PARTS.items() for i, part in enumerate(parts) for side in "AB"
} | {
    f"{name}.lora_{side}": f"{part}.lora_{side.lower()}" for name, part in _ADAPTED.items() for side in "AB"
}  # fmt: skip
_SWITCH = Checkpoint(
    "graniteswitch", ("GraniteSwitchForCausalLM",),
    dict(_MIXTURE.keys) | {
        "block_count": lambda settings: settings["num_hidden_layers"] - 1,
        "expert_used_count": 0,
        "adapters.count": field("num_adapters"), "adapters.lora_rank": field("max_lora_rank"),
        "adapters.token_ids_activate": lambda settings: settings["adapter_token_ids"],
        "adapters.token_ids_substitute": lambda settings: settings["adapter_substitute_token_ids"],
        "adapters.router_gain": field("control_token_gain", kind=float),
    },
    _DEFAULTS | {"control_token_gain": 15.0}, _VOCABULARY, _PRE,
    drop=(r"^lm_head\.weight$", r"^(model\.)?switch\.", r"(^|\.)(adapter_token_ids|control_to_substitute_lut)$"),
    rename=(
        (r"\.shared_mlp\.input_linear\.base_layer\.", ".mlp.gate_up_linear."),
        (r"\.shared_mlp\.output_linear\.base_layer\.", ".mlp.down_proj."), (r"\.base_layer\.", "."),
    ),
    split=_DENSE, names="granite",
    tensors={f"model.layers.{{}}.{name}": f"blk.{{}}.{target}"
             for name, target in (_CHANGES | {"self_attn.qkv_proj": "attn_qkv"}).items()},
    convert={target: _adapters(target) for target in _CHANGES.values()}
    | {"attn_qkv.weight": Conversion(_joined)},
)  # fmt: skip
CHECKPOINTS = (_GRANITE, _MIXTURE, _HYBRID, _BAMBA, _SWA, _SWITCH)


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

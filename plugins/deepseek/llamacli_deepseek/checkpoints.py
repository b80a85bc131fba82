"""Hugging Face checkpoints of DeepSeek and others with latent attention."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from llamacli.plugin import (
    INTERLEAVED,
    MINUS_EXP,
    Checkpoint,
    Conversion,
    Settings,
    field,
    head_dim,
    hookimpl,
    n_blocks,
    rope_of,
)

LLAMACLI_API = 1

Shape = tuple[int, ...]


def _heads(shape: Shape, settings: Settings) -> tuple[int, int, int, int]:
    """Heads, sizes of a key and a value, and rank of `kv_b_proj`."""
    n_head, n_key, n_value = (settings[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    if len(shape) != 2 or shape[0] != n_head * (n_key + n_value):
        raise ValueError(f"shape {shape}, expected {n_head} heads of {n_key} + {n_value} rows")
    return n_head, n_key, n_value, shape[1]


def _keys_shape(shape: Shape, settings: Settings) -> Shape:
    n_head, n_key, _, rank = _heads(shape, settings)
    return n_head, rank, n_key


def _values_shape(shape: Shape, settings: Settings) -> Shape:
    n_head, _, n_value, rank = _heads(shape, settings)
    return n_head, n_value, rank


def _of_heads(array: Any, settings: Settings) -> tuple[Any, int]:
    n_head, n_key, n_value, rank = _heads(array.shape, settings)
    return array.reshape(n_head, n_key + n_value, rank), n_key


def _keys(array: Any, settings: Settings) -> Any:
    heads, n_key = _of_heads(array, settings)
    return heads[:, :n_key].swapaxes(1, 2)


def _values(array: Any, settings: Settings) -> Any:
    heads, n_key = _of_heads(array, settings)
    return heads[:, n_key:]


def _left_out(settings: Settings) -> tuple[str, ...]:
    """Blocks for multi-token prediction, and a tied output."""
    blocks = tuple(rf"^model\.layers\.{i}\." for i in range(settings["num_hidden_layers"], n_blocks(settings)))
    return blocks + ((r"lm_head\.weight$",) if settings.get("tie_word_embeddings") else ())


def _dense(settings: Settings) -> int:
    n_dense = settings.get("first_k_dense_replace")
    if n_dense is None:
        return 0 if settings.get("n_routed_experts") is not None else int(settings["num_hidden_layers"])
    return int(n_dense)


def _scale(settings: Settings) -> float | None:
    scale = settings.get("routed_scaling_factor")
    return None if scale is None else float(scale)


def _log_multiplier(settings: Settings) -> float | None:
    multiplier = rope_of(settings).get("mscale_all_dim")
    return None if multiplier is None else 0.1 * multiplier


def latent_heads(settings: Settings) -> list[int]:
    """Heads of keys and values, one in layers with latent attention."""
    latent = settings["linear_attn_config"]["full_attn_layers"]
    return [int(i + 1 in latent) for i in range(settings["num_hidden_layers"])]


def indexed(settings: Settings) -> list[bool] | None:
    """Layers that choose cells themselves."""
    kinds = settings.get("indexer_types")
    return None if kinds is None else [kind == "full" for kind in kinds]


def glm_tokens(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Special tokens that folders of GLM name by their texts only."""
    ids = {added["content"]: int(number) for number, added in tokenizer.get("added_tokens_decoder", {}).items()}
    texts = {"bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>"}
    return {f"tokenizer.ggml.{name}_token_id": ids[text] for name, text in texts.items() if text in ids}


def _has_latent(settings: Settings) -> list[bool]:
    """Blocks of Ling 3 with latent attention, the last of each group.

    All behind the groups have it.
    """
    n_layer, size = settings["num_hidden_layers"], settings["layer_group_size"]
    return [i >= n_layer // size * size or (i + 1) % size == 0 for i in range(n_blocks(settings))]


def _ling_names(settings: Settings) -> tuple[tuple[str, str], ...]:
    latent = "|".join(str(i) for i, found in enumerate(_has_latent(settings)) if found)
    return (
        (r"\.attention\.", ".self_attn."), (r"\.expert_bias$", ".expert_bias.bias"), (r"\.dt_bias$", ".dt_proj.bias"),
        (rf"(\.layers\.({latent})\.self_attn)\.g_proj\.", r"\1.gate_proj."), (r"\.([fg])_proj\.", r".\1_a_proj."),
    )  # fmt: skip


def _safe_gate(settings: Settings) -> bool:
    known = {"no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise"}
    for name, value in known.items():
        if (found := settings.get(name)) != value:
            raise ValueError(f"{name} is {found!r}, expected {value!r}")
    return True


def _limits(name: str) -> Callable[[Settings], list[float] | None]:
    """Bounds of networks in all blocks, 0 for none."""

    def limits(settings: Settings) -> list[float] | None:
        if (found := settings.get(name)) is None:
            return None
        return [float(x or 0) for x in [*found, *[0] * n_blocks(settings)][: n_blocks(settings)]]

    return limits


def _sections(settings: Settings) -> list[int]:
    found, n_rope = settings["mrope_section"][:3], settings["qk_rope_head_dim"]
    if 2 * sum(found) != n_rope:
        raise ValueError(f"mrope_section is {found}, expected {n_rope} / 2 in all, by qk_rope_head_dim")
    return [*found, 0]


def _hy4_dense(settings: Settings) -> int:
    """Number of dense blocks, all of which come first."""
    kinds, stated = settings.get("mlp_layer_types"), settings.get("first_k_dense_replace")
    if kinds is None and stated is None:
        raise KeyError("mlp_layer_types")
    n_dense = stated if kinds is None else sum(kind == "dense" for kind in kinds)
    if kinds and ("dense" in kinds[n_dense:] or stated not in (None, n_dense)):
        raise ValueError(f"mlp_layer_types is {kinds} and first_k_dense_replace {stated}: dense blocks must come first")
    return int(n_dense or 0)


def _chooses(settings: Settings) -> list[bool] | None:
    """Blocks of Hunyuan 4 with an indexer; None if there are none."""
    kinds = settings.get("indexer_types") or settings.get("layer_types") or []
    found = [kind in ("full", "sparse_attention", "deepseek_sparse_attention") for kind in kinds]
    if not any(found):
        return None
    if len(found) < settings["num_hidden_layers"] or (settings.get("indexer_types") and {*kinds} - {"full", "shared"}):
        raise ValueError(f"indexer_types is {kinds}, expected 'full' or 'shared' for each block")
    return found[: settings["num_hidden_layers"]]


def _of_indexer(name: str) -> Callable[[Settings], int | None]:
    return lambda settings: None if _chooses(settings) is None else int(settings[name])


def _hy4_float32(settings: Settings) -> tuple[str, ...]:
    gates = tuple(f"{name}_fn.weight" for name in ("hc_attn", "hc_ffn", "output_hc"))
    return (*gates, "output.weight") if settings.get("enable_lm_head_fp32") else gates


def _groups(name: str) -> Callable[[Settings], int | None]:
    """Number of groups of experts, if there are several."""
    return lambda settings: None if settings.get("n_group") == settings.get("topk_group") == 1 else settings.get(name)


_EXPERT_KEYS: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "leading_dense_block_count": _dense,
    "expert_feed_forward_length": field("moe_intermediate_size"),
    "expert_shared_count": lambda settings: settings.get("n_shared_experts") or 0,
}  # fmt: skip
_MIXTURE_KEYS = _EXPERT_KEYS | {
    "attention.q_lora_rank": field("q_lora_rank"),
    "expert_weights_scale": _scale,
    "expert_weights_norm": lambda settings: settings.get("norm_topk_prob") or None,
    "rope.dimension_count": field("qk_rope_head_dim"),
    "rope.scaling.yarn_log_multiplier": _log_multiplier,
}
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "num_key_value_heads": lambda settings: settings["num_attention_heads"],
    "moe_intermediate_size": field("intermediate_size"),
}  # fmt: skip
PRE = ("deepseek-v3", "deepseek-llm")

LATENT = Checkpoint(
    "deepseek2",
    (
        "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiVLForConditionalGeneration",
        "KimiK25ForConditionalGeneration", "YoutuForCausalLM", "YoutuVLForConditionalGeneration",
    ),
    _MIXTURE_KEYS | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": field("kv_lora_rank"),
        "attention.key_length": lambda settings: settings["kv_lora_rank"] + settings["qk_rope_head_dim"],
        "attention.value_length": field("kv_lora_rank"),
        "attention.key_length_mla": lambda settings: settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"],
        "attention.value_length_mla": field("v_head_dim"),
    },
    _DEFAULTS | {"kv_lora_rank": 512},
    pre=PRE, drop=_left_out,
    whole={"kv_b_proj": ("k_b_proj", "v_b_proj")},
    convert={"attn_k_b.weight": Conversion(_keys, _keys_shape), "attn_v_b.weight": Conversion(_values, _values_shape)},
)  # fmt: skip
TAPS = Conversion(
    lambda array, settings: array.reshape(1, array.shape[0], 1, array.shape[-1]),
    lambda shape, settings: (1, shape[0], 1, shape[-1]),
)
_LING = Checkpoint(
    "bailingmoe3", ("BailingMoeV3ForCausalLM",),
    {
        "block_count": n_blocks, "attention.head_count_kv": lambda settings: [int(x) for x in _has_latent(settings)],
        "vocab_size": field("vocab_size"), "ssm.conv_kernel": field("short_conv_kernel_size"),
        "kda.head_dim": field("head_dim"), "kda.safe_gate": _safe_gate,
        "kda.gate_lower_bound": field("kda_lower_bound", kind=float), "rope.dimension_count": field("qk_rope_head_dim"),
        **{f"attention.{name}": LATENT.keys[f"attention.{name}"] for name in (
            "q_lora_rank", "kv_lora_rank", "key_length", "key_length_mla", "value_length_mla")},
        "expert_feed_forward_length": field("moe_intermediate_size"),
        "expert_shared_feed_forward_length": field("moe_shared_expert_intermediate_size"),
        "expert_shared_count": field("num_shared_experts"),
        "leading_dense_block_count": field("first_k_dense_replace"),
        "expert_weights_scale": field("routed_scaling_factor", kind=float),
        "expert_weights_norm": field("norm_topk_prob", kind=bool),
        "swiglu_clamp_exp": _limits("expert_swiglu_limit_list"),
        "swiglu_clamp_shexp": _limits("share_expert_swiglu_limit_list"),
        "nextn_predict_layers": lambda settings: settings.get("num_nextn_predict_layers") or None,
    },
    {"num_shared_experts": 1}, pre=("bailingmoe2",), rename=_ling_names, names="kimi-linear",
    tensors={
        f"model.layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in {
            "self_attn.gate_proj": "attn_gate", "final_layernorm": "layer_output_norm",
            **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")},
        }.items()
    },
    whole=LATENT.whole,
    convert=dict(LATENT.convert) | {f"ssm_conv1d_{name}.weight": TAPS for name in "qkv"} | {
        "ssm_a": Conversion(
            lambda array, settings: np.exp(array)[:, None], lambda shape, settings: (*shape, 1), computes=True
        ),
    },
)  # fmt: skip

_LINEAR = attrs.evolve(
    LATENT, architecture="kimi-linear", classes=("KimiLinearForCausalLM", "KimiLinearModel"), drop=(),
    pre=("kimi-k2",), rename=((r"\.dt_bias$", ".dt_proj.bias"),),
    keys={key: LATENT.keys[key] for key in (
        "vocab_size", "expert_feed_forward_length", "leading_dense_block_count", "expert_weights_scale",
        "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length", "attention.key_length_mla",
        "attention.value_length_mla", "rope.dimension_count",
    )} | {
        "attention.head_count_kv": latent_heads, "expert_shared_count": field("num_shared_experts"),
        "ssm.conv_kernel": lambda settings: settings["linear_attn_config"]["short_conv_kernel_size"],
        "kda.head_dim": lambda settings: settings["linear_attn_config"]["head_dim"],
    },
    convert={**LATENT.convert, "ssm_a": MINUS_EXP, **{f"ssm_conv1d_{name}.weight": TAPS for name in "qkv"}},
)  # fmt: skip
SPARSE = attrs.evolve(
    LATENT, architecture="deepseek32", classes=("DeepseekV32ForCausalLM",), drop=(),
    keys=dict(LATENT.keys) | {
        "block_count": n_blocks,
        "nextn_predict_layers": field("num_nextn_predict_layers"),
        "attention.indexer.head_count": field("index_n_heads"),
        "attention.indexer.key_length": field("index_head_dim"),
        "attention.indexer.top_k": field("index_topk"),
    },
    names="deepseek2",
    tensors={
        f"model.layers.{{}}.self_attn.indexer.{name}": f"blk.{{}}.indexer.{target}"
        for name, target in (("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm"), ("weights_proj", "proj"))
    } | {
        f"model.layers.{{}}.{name}": f"blk.{{}}.nextn.{name.replace('.', '_')}"
        for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    },
)  # fmt: skip

CHECKPOINTS = (
    LATENT,
    _LING,
    attrs.evolve(
        _LING, classes=("BailingMoeV3VLForConditionalGeneration",), drop=(r"^linear_proj\.",),
        keys=dict(_LING.keys) | {"rope.dimension_sections": _sections},
    ),
    attrs.evolve(LATENT, classes=("Glm4MoeLiteForCausalLM",), pre=("glm4", "chatglm-bpe"), tokenizer=glm_tokens),
    _LINEAR,
    SPARSE,
    attrs.evolve(
        SPARSE, architecture="glm-dsa", classes=("GlmMoeDsaForCausalLM",), pre=("glm4", "chatglm-bpe"),
        keys=dict(SPARSE.keys) | {
            "rope.dimension_count":
            lambda settings: int(settings["qk_rope_head_dim"] * rope_of(settings).get("partial_rotary_factor", 1.0)),
            "attention.indexer.types": indexed,
        },
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "kv_lora_rank": 512},
        tokenizer=glm_tokens,
    ),
    attrs.evolve(
        LATENT, architecture="hy_v4", classes=("HYV4ForCausalLM",), names="deepseek2",
        pre=("hy_v4", *PRE), float32=_hy4_float32,
        drop=lambda settings: (*_left_out(settings), r"^model\.mtp_layers\."),
        keys=dict(LATENT.keys) | {
            "leading_dense_block_count": _hy4_dense, "expert_gating_func": 2, "expert_group_count": _groups("n_group"),
            "expert_group_used_count": _groups("topk_group"),
            "swiglu_clamp_exp": lambda settings: [float(settings["swiglu_limit"])] * settings["num_hidden_layers"]
            if (settings.get("swiglu_limit") or 0) > 0 else None,
            "hyper_connection.count": field("hc_mult"), "hyper_connection.epsilon": field("hc_eps", kind=float),
            "hyper_connection.magnitude": field("hc_magnitude", kind=float),
            "attention.indexer.head_count": _of_indexer("index_n_heads"),
            "attention.indexer.key_length": _of_indexer("index_head_dim"),
            "attention.indexer.top_k": _of_indexer("index_topk"), "attention.indexer.types": _chooses,
        },
        rename=((r"(\.experts\.\w+|\.learnable_sink_param|\.hc_(?:head_)?(?:fn|base|scale))$", r"\1.weight"),),
        split={r"\.experts\.gate_up_proj\.": (".experts.gate_proj.", ".experts.up_proj.")},
        tensors={
            f"model.layers.{{}}.self_attn.indexer.{name}": f"blk.{{}}.indexer.{target}"
            for name, target in (("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm"), ("weights_proj", "proj"))
        } | {f"model.hc_head.hc_head_{name}": f"output_hc_{name}" for name in ("fn", "base", "scale")} | {
            f"model.layers.{{}}.hc_{kind}_layer.hc_pre.hc_{name}": f"blk.{{}}.hc_{target}_{name}"
            for kind, target in (("attn", "attn"), ("mlp", "ffn")) for name in ("fn", "base", "scale")
        } | {"model.layers.{}.self_attn.learnable_sink_param": "blk.{}.attn_sinks",
             "model.layers.{}.self_attn.linear_gate": "blk.{}.attn_gate"},
    ),
    Checkpoint(
        "deepseek2-ocr", ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
        _MIXTURE_KEYS | {
            "attention.sliding_window":
            lambda settings: settings.get("sliding_window_size") or settings.get("sliding_window") or None,
        },
        _DEFAULTS, pre=PRE, drop=(r"sam_model|qwen2_model",),
    ),
    Checkpoint(
        "deepseek", ("DeepseekForCausalLM",),
        _EXPERT_KEYS | {"expert_weights_scale": 1.0, "rope.dimension_count": head_dim, "rope.scaling.type": "none"},
        _DEFAULTS, ("sentencepiece", "bpe"), pre=PRE, convert=INTERLEAVED,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

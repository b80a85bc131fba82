"""Hugging Face checkpoints of DeepSeek, Kimi, Youtu, GLM-4.7-Flash and GLM-5."""

from collections.abc import Callable
from typing import Any

import attrs

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
    n_head, n_key, n_value = (settings[name] for name in ("num_key_value_heads", "qk_nope_head_dim", "v_head_dim"))
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


def _latent_heads(settings: Settings) -> list[int]:
    """Heads of keys and values, one in layers with latent attention."""
    latent = settings["linear_attn_config"]["full_attn_layers"]
    return [int(i + 1 in latent) for i in range(settings["num_hidden_layers"])]


def _indexed(settings: Settings) -> list[bool] | None:
    """Layers that choose cells themselves."""
    kinds = settings.get("indexer_types")
    return None if kinds is None else [kind == "full" for kind in kinds]


def _glm_tokens(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Special tokens that folders of GLM name by their texts only."""
    ids = {added["content"]: int(number) for number, added in tokenizer.get("added_tokens_decoder", {}).items()}
    texts = {"bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>"}
    return {f"tokenizer.ggml.{name}_token_id": ids[text] for name, text in texts.items() if text in ids}


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
_PRE = ("deepseek-v3", "deepseek-llm")

_LATENT = Checkpoint(
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
    pre=_PRE, drop=_left_out,
    whole={"kv_b_proj": ("k_b_proj", "v_b_proj")},
    convert={"attn_k_b.weight": Conversion(_keys, _keys_shape), "attn_v_b.weight": Conversion(_values, _values_shape)},
)  # fmt: skip

_TAPS = Conversion(
    lambda array, settings: array.reshape(1, array.shape[0], 1, array.shape[-1]),
    lambda shape, settings: (1, shape[0], 1, shape[-1]),
)
_LINEAR = attrs.evolve(
    _LATENT, architecture="kimi-linear", classes=("KimiLinearForCausalLM", "KimiLinearModel"), drop=(),
    pre=("kimi-k2",), rename=((r"\.dt_bias$", ".dt_proj.bias"),),
    keys={key: _LATENT.keys[key] for key in (
        "vocab_size", "expert_feed_forward_length", "leading_dense_block_count", "expert_weights_scale",
        "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length", "attention.key_length_mla",
        "attention.value_length_mla", "rope.dimension_count",
    )} | {
        "attention.head_count_kv": _latent_heads, "expert_shared_count": field("num_shared_experts"),
        "ssm.conv_kernel": lambda settings: settings["linear_attn_config"]["short_conv_kernel_size"],
        "kda.head_dim": lambda settings: settings["linear_attn_config"]["head_dim"],
    },
    convert={**_LATENT.convert, "ssm_a": MINUS_EXP, **{f"ssm_conv1d_{name}.weight": _TAPS for name in "qkv"}},
)  # fmt: skip
_SPARSE = attrs.evolve(
    _LATENT, architecture="deepseek32", classes=("DeepseekV32ForCausalLM",), drop=(),
    keys=dict(_LATENT.keys) | {
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
    _LATENT,
    attrs.evolve(_LATENT, classes=("Glm4MoeLiteForCausalLM",), pre=("glm4", "chatglm-bpe"), tokenizer=_glm_tokens),
    _LINEAR,
    _SPARSE,
    attrs.evolve(
        _SPARSE, architecture="glm-dsa", classes=("GlmMoeDsaForCausalLM",), pre=("glm4", "chatglm-bpe"),
        keys=dict(_SPARSE.keys) | {
            "rope.dimension_count":
            lambda settings: int(settings["qk_rope_head_dim"] * rope_of(settings).get("partial_rotary_factor", 1.0)),
            "attention.indexer.types": _indexed,
        },
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "kv_lora_rank": 512},
        tokenizer=_glm_tokens,
    ),
    Checkpoint(
        "deepseek2-ocr", ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM"),
        _MIXTURE_KEYS | {
            "attention.sliding_window":
            lambda settings: settings.get("sliding_window_size") or settings.get("sliding_window") or None,
        },
        _DEFAULTS, pre=_PRE, drop=(r"sam_model|qwen2_model",),
    ),
    Checkpoint(
        "deepseek", ("DeepseekForCausalLM",),
        _EXPERT_KEYS | {"expert_weights_scale": 1.0, "rope.dimension_count": head_dim, "rope.scaling.type": "none"},
        _DEFAULTS, ("sentencepiece", "bpe"), pre=_PRE, convert=INTERLEAVED,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints with several kinds of latent or delta attention."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import Checkpoint, Conversion, Settings, field, hookimpl, n_blocks
from llamacli_deepseek.checkpoints import LATENT, SPARSE, TAPS, glm_tokens, indexed, latent_heads

LLAMACLI_API = 1


def _nope(settings: Settings) -> int:
    """Numbers of a head that RoPE would rotate."""
    if not settings.get("mla_use_nope"):
        raise ValueError(f"mla_use_nope is {settings.get('mla_use_nope')!r}, expected true")
    return int(settings["qk_rope_head_dim"])


def _linear(name: str, kind: Callable[[Any], Any] = int) -> Callable[[Settings], Any]:
    """Field of the layers with delta attention, or None."""
    return lambda settings: field(name, kind=kind)(settings["linear_attn_config"])


def _tied(settings: Settings) -> tuple[str, ...]:
    return (r"lm_head\.weight$",) if settings.get("tie_word_embeddings") else ()


def _glm_heads(settings: Settings) -> list[int]:
    """Heads of keys and values, none in layers with delta attention."""
    kinds, n_layer = settings["layer_types"], settings["num_hidden_layers"]
    if len(kinds) != n_layer:
        raise ValueError(f"layer_types has {len(kinds)} entries, expected {n_layer}")
    return [int(kind != "linear_attention") for kind in kinds] + [1] * (n_blocks(settings) - n_layer)


def _glm_streams(settings: Settings) -> int:
    if not settings.get("mhc", True):
        raise ValueError("mhc is false, expected true")
    return int(settings["hc_mult"])


def _limit(settings: Settings) -> list[float] | None:
    limit = settings.get("swiglu_limit")
    return None if limit is None else [float(limit)] * n_blocks(settings)


def _k3_act(settings: Settings) -> float:
    if settings.get("hidden_act") != "situ":
        raise ValueError(f"hidden_act is {settings.get('hidden_act')!r}, expected 'situ'")
    return float(settings["activation_situ_beta"])


def _k3_names(settings: Settings) -> tuple[tuple[str, str], ...]:
    """New names of gates, of which two kinds have one."""
    latent = "|".join(str(i - 1) for i in settings["linear_attn_config"]["full_attn_layers"])
    return (r"\.dt_bias$", ".dt_proj.bias"), (rf"(\.layers\.({latent})\.self_attn)\.g_proj\.", r"\1.gate_proj.")


def _k3_scores(settings: Settings) -> dict[str, Any]:
    """Products of norms and projections, by which depth is attended to."""
    found, names = {}, {"self_attention": "attn", "mlp": "ffn", "output_attn": "output"}
    for name in settings["tensor_names"]:
        if match := re.fullmatch(r"(.*?(?:\.layers\.(\d+))?\.(\w+)_res_)(?:norm|proj)\.weight", name):
            parts = (settings["numbers"](f"{match[1]}{part}.weight") for part in ("norm", "proj"))
            norm, projection = (part.reshape(-1).astype(np.float32) for part in parts)
            block = f"blk.{match[2]}." if match[2] else ""
            found[f"{block}{names[match[3]]}_res_score.weight"] = norm * projection
    return found


def _k3_stop(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Token at the end of a turn, by config.json."""
    eos = settings.get("eos_token_id")
    return {} if eos is None else {"tokenizer.ggml.eos_token_id": eos}


def _dots_end(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Token at the end of an answer, by its text."""
    text, tokens = "<|endofassistant|>", settings["vocabulary"]["tokenizer.ggml.tokens"]
    if text not in tokens:
        raise ValueError(f"no token is {text!r}")
    return {"tokenizer.ggml.eot_token_id": tokens.index(text)}


_DOTS = {
    "use_dsa": True, "normalization": "RMSNorm", "final_norm": "RMSNorm", "k_rope_only_layernorm": True,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "use_dynamic_rsf": False,
    "moe_gating_fp32": False, "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise",
}  # fmt: skip
"""Values of fields of dots3-note that its graph takes for granted."""


def _dots_blocks(settings: Settings) -> int:
    """Number of blocks, with one for multi-token prediction if it is there."""
    return int(settings["num_hidden_layers"]) + ("model.mtp.embed_tokens.weight" in settings["tensor_names"])


def _windowed(settings: Settings) -> list[bool]:
    """Blocks with a window, among them that for multi-token prediction."""
    kinds, n_layer = settings["layer_types"], settings["num_hidden_layers"]
    if len(kinds) < n_layer:
        raise ValueError(f"layer_types has {len(kinds)} entries, expected {n_layer}")
    return [kind == "sliding_attention" for kind in kinds[:n_layer]] + [True] * (_dots_blocks(settings) - n_layer)


def _dots_pattern(settings: Settings) -> list[bool]:
    for name, value in _DOTS.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{name} is {settings[name]!r}, expected {value!r}")
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        if settings[f"swa_{name}"] != settings[name]:
            raise ValueError(f"swa_{name} is {settings[f'swa_{name}']}, expected {settings[name]}, by {name}")
    return _windowed(settings)[: settings["num_hidden_layers"]]


def _of_windows(settings: Settings) -> Settings:
    """Fields of config.json, with the sizes of layers with a window."""
    names = "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"
    return {**settings, **{name: settings[f"swa_{name}"] for name in names}}


def _sizes(settings: Settings, block: int | None = None) -> Settings:
    """Fields of config.json, with the sizes of a block."""
    block = settings["block"] if block is None else block
    return _of_windows(settings) if _windowed(settings)[block] else settings


def _windowed_key(key: str) -> Callable[[Settings], Any]:
    """Value of a key of latent attention in layers with a window."""
    return lambda settings: LATENT.keys[key](_of_windows(settings))


def _by_block(conversion: Conversion) -> Conversion:
    """Conversion by the sizes of the tensor's block."""
    return Conversion(
        lambda array, settings: conversion.apply(array, _sizes(settings)),
        lambda shape, settings: conversion.shape(shape, _sizes(settings)),
    )


def _rescaled(rank: str) -> Conversion:
    """Norms of compressed numbers, scaled by the root of their share."""

    def apply(array: Any, settings: Settings) -> Any:
        if not settings.get("apply_mla_qkv_lora_rescale"):
            return array
        factor = np.float32(math.sqrt(settings["hidden_size"] / _sizes(settings)[rank]))
        return (array.astype(np.float32) * factor).astype(array.dtype)

    return Conversion(apply, computes=True)


_DECAYS = Conversion(
    lambda array, settings: -np.exp(array.reshape(-1)[: settings["num_attention_heads"]]),
    lambda shape, settings: (settings["num_attention_heads"],),
    computes=True,
)
_KEYS: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "rope.dimension_count": _nope,
    "ssm.conv_kernel": _linear("short_conv_kernel_size"), "kda.head_dim": _linear("head_dim"),
    "kda.gate_lower_bound": _linear("gate_lower_bound", float),
    **{f"attention.{name}": LATENT.keys[f"attention.{name}"] for name in (
        "q_lora_rank", "kv_lora_rank", "key_length", "value_length", "key_length_mla", "value_length_mla")},
    "expert_feed_forward_length": field("moe_intermediate_size"),
    "leading_dense_block_count": field("first_k_dense_replace"),
    "expert_weights_scale": field("routed_scaling_factor", kind=float),
}  # fmt: skip
_CONVERT = dict(LATENT.convert) | {"ssm_a": _DECAYS} | {f"ssm_conv1d_{name}.weight": TAPS for name in "qkv"}
_EXACT = tuple(f"{name}.weight" for name in (
    "hc_attn_fn", "hc_ffn_fn", "indexer_compressor_ape", "indexer_compressor_gate"))  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "glm5-next", ("Glm5NextForConditionalGeneration",),
        _KEYS | {
            "block_count": n_blocks, "attention.head_count_kv": _glm_heads, "attention.layer_norm_epsilon": 1e-6,
            "nextn_predict_layers": lambda settings: settings.get("num_nextn_predict_layers") or None,
            **{f"attention.indexer.{name}": field(f"index_{source}") for name, source in (
                ("head_count", "n_heads"), ("key_length", "head_dim"), ("top_k", "topk"), ("kpool", "kpool"))},
            "attention.indexer.kpool_select_tail":
            lambda settings: bool(settings.get("index_kpool_always_select_tail", True)),
            "attention.indexer.types": indexed,
            "hyper_connection.count": _glm_streams,
            "hyper_connection.sinkhorn_iterations": field("hc_sinkhorn_iters"),
            "hyper_connection.epsilon": field("hc_eps", kind=float),
            "expert_shared_count": field("n_shared_experts"),
            "expert_weights_norm": field("norm_topk_prob", kind=bool),
            "swiglu_clamp_exp": _limit, "swiglu_clamp_shexp": _limit,
        },
        pre=("glm4", "chatglm-bpe"), tokenizer=glm_tokens, names="kimi-linear", whole=LATENT.whole, convert=_CONVERT,
        drop=_tied,
        rename=(
            (r"\.dt_bias$", ".dt_proj.bias"),
            (r"(\.hc_(?:attn|ffn)_(?:fn|base|scale)|\.index_kpool_compress_(?:ape|gate))$", r"\1.weight"),
        ),
        tensors=dict(SPARSE.tensors) | {
            f"model.layers.{{}}.self_attn.indexer.index_kpool_compress_{name}": f"blk.{{}}.indexer_compressor_{name}"
            for name in ("ape", "gate")
        } | {f"model.layers.{{}}.hc_{name}": f"blk.{{}}.hc_{name}" for name in (
            f"{kind}_{part}" for kind in ("attn", "ffn") for part in ("fn", "base", "scale"))},
        float32=_EXACT,
    ),
    Checkpoint(
        "kimi-k3", ("KimiK3ForConditionalGeneration",),
        _KEYS | {
            "attention.head_count_kv": latent_heads, "expert_shared_count": field("num_shared_experts"),
            "expert_weights_norm": field("moe_renormalize", kind=bool),
            "expert_latent_length": field("routed_expert_hidden_size"), "activation.situ_beta": _k3_act,
            "activation.situ_linear_beta": field("activation_situ_linear_beta", kind=float),
            "attn_res.block_size": field("attn_res_block_size"),
        },
        pre=("kimi-k2",), tokenizer=_k3_stop, names="kimi-linear", whole=LATENT.whole, convert=_CONVERT,
        drop=(r"_res_(norm|proj)\.weight$",), rename=_k3_names, extra=_k3_scores,
        tensors={f"model.layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in (
            ("self_attn.gate_proj", "attn_gate"), ("self_attn.g_proj", "ssm_g"),
            *((f"block_sparse_moe.routed_expert_{source}", f"ffn_routed_{target}") for source, target in (
                ("down_proj", "down"), ("up_proj", "up"), ("norm", "norm"))))},
    ),
    Checkpoint(
        "dots3note",
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "Dots3NoteTextForCausalLM"),
        dict(LATENT.keys) | {
            "block_count": _dots_blocks,
            "nextn_predict_layers": lambda settings: _dots_blocks(settings) - settings["num_hidden_layers"] or None,
            "attention.head_count": lambda settings: [
                _sizes(settings, i)["num_attention_heads"] for i in range(_dots_blocks(settings))
            ],
            "attention.sliding_window": field("sliding_window_size"),
            "attention.sliding_window_pattern": _dots_pattern,
            **{f"attention.{name}_swa": _windowed_key(f"attention.{name}") for name in (
                "kv_lora_rank", "key_length", "value_length", "key_length_mla", "value_length_mla")},
            **{f"attention.indexer.{name}": field(f"index_{source}") for name, source in (
                ("head_count", "n_heads"), ("key_length", "head_dim"), ("top_k", "topk"))},
            "attention.indexer.types": lambda settings: [not found for found in _dots_pattern(settings)],
        },
        LATENT.defaults, pre=("qwen2",), tokenizer=_dots_end, names="deepseek2", whole=LATENT.whole,
        convert={name: _by_block(conversion) for name, conversion in LATENT.convert.items()}
        | {"attn_q_a_norm.weight": _rescaled("q_lora_rank"), "attn_kv_a_norm.weight": _rescaled("kv_lora_rank")},
        drop=_tied,
        rename=lambda settings: ((r"^model\.mtp\.", f"model.layers.{settings['num_hidden_layers']}."),),
        tensors=dict(SPARSE.tensors) | {"model.layers.{}.self_attn.k_rope_only_layernorm": "blk.{}.attn_k_norm",
                                        "model.layers.{}.self_attn.g_proj": "blk.{}.attn_gate"},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

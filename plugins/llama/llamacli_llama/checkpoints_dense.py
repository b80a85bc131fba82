"""Hugging Face checkpoints of MiniCPM, Baichuan, BitNet, HRM-Text and others."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import (
    INTERLEAVED,
    PLUS_ONE,
    Checkpoint,
    Conversion,
    Settings,
    field,
    head_dim,
    hookimpl,
    rope_of,
)
from llamacli_llama import checkpoints as llama

LLAMACLI_API = 1


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_space_prefix": tokenizer.get("add_prefix_space")}


def _chat_end(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Space before texts, and the end of messages as that of texts."""
    added = tokenizer.get("added_tokens_decoder", {})
    ends = [int(i) for i, token in added.items() if token["content"] == "<|im_end|>" and token.get("special")]
    return _space_prefix(kind, tokenizer, settings) | ({"tokenizer.ggml.eos_token_id": ends[0]} if ends else {})


def _tied_output(settings: Settings) -> tuple[str, ...]:
    return (r"^lm_head\.",) if settings.get("tie_word_embeddings") else ()


def _factors(n_rot: Callable[[Settings], int]) -> Callable[[Settings], dict[str, npt.NDArray[np.float32]]]:
    """Factors of frequencies in long and short contexts."""

    def extra(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
        factors = {name: rope_of(settings).get(f"{name}_factor") for name in ("long", "short")}
        if not any(factors.values()):
            return {}
        if wrong := [name for name, numbers in factors.items() if len(numbers or ()) != n_rot(settings) // 2]:
            raise ValueError(f"{wrong[0]}_factor is {factors[wrong[0]]}, expected {n_rot(settings) // 2} numbers")
        return {f"rope_factors_{name}.weight": np.array(numbers, np.float32) for name, numbers in factors.items()}

    return extra


def _query_width(settings: Settings) -> int:
    return int(settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"])


def _widths(settings: Settings) -> list[int]:
    """Widths of OpenELM's networks, multiples of a number."""
    n, found = int(settings["ffn_dim_divisor"]), []
    for factor in settings["ffn_multipliers"]:
        wish = factor * settings["model_dim"]
        width = max(n, int(wish + n / 2) // n * n)
        found.append(width + n if width < 0.9 * wish else width)
    return found


def _refact_width(settings: Settings) -> int:
    """Width of Refact's networks, which its folders lack."""
    return -(-int(8 * settings["n_embd"] / 3) // 256) * 256


def _share(kind: str) -> Callable[[Settings], int]:
    """Rotated numbers of heads in layers with this attention."""
    return lambda settings: int(
        settings["head_dim"] * float(settings["rope_parameters"][kind]["partial_rotary_factor"])
    )


def _is_sliding(settings: Settings) -> list[bool]:
    return [kind == "sliding_attention" for kind in settings["layer_types"]]


def _glimmer_layers(settings: Settings) -> list[str]:
    """Kinds of layers: every fourth, counted from the last, attends to everything."""
    last = settings["num_hidden_layers"] - 1
    return ["sliding_attention" if (last - i) % 4 else "full_attention" for i in range(last + 1)]


def _glimmer_norms(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of the norms of queries, a factor, and of keys, one."""
    width = np.ones(settings["head_dim"], np.float32)
    factors = {"q": np.float32(settings["qk_scale_factor"]), "k": np.float32(1.0)}
    return {
        f"blk.{i}.attn_{name}_norm.weight": width * factor
        for i in range(settings["num_hidden_layers"])
        for name, factor in factors.items()
    }


def _end_of_turn(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    added = tokenizer.get("added_tokens_decoder", {})
    return {"tokenizer.ggml.eot_token_id": next((int(i) for i, x in added.items() if x["content"] == "<|eot|>"), None)}


def _window(settings: Settings) -> int | None:
    """Tokens that SmallThinker's sliding layers see; None where it has none."""
    return settings.get("sliding_window_size") or None if any(settings.get("sliding_window_layout") or ()) else None


def _ternary(array: Any, settings: Settings) -> Any:
    """Weights -1, 0 and 1, times the mean of BitNet's magnitudes."""
    weights = array.astype(np.float32)
    factor = np.float32(1) / np.float32(max(np.abs(weights).mean(dtype=np.float64), 1e-5))
    return np.clip(np.rint(weights * factor), -1, 1) / factor


def _spark_vocabulary(settings: Settings) -> int:
    """Tokens of the vocabulary.

    ValueError for gates or networks that Spark 2.5 does not have.
    """
    for name, value in _SPARK.items():
        if settings.get(name) != value:
            raise ValueError(f"{name} is {settings.get(name)!r}, expected {value!r}")
    return int(settings["vocab_size"])


_SPARK = {"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True, "hidden_act": "gelu"}
_WITHOUT_ROPE = {"rope.freq_base": None, "rope.scaling.type": None, "rope.scaling.factor": None}
_LATENT: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "attention.kv_lora_rank": field("kv_lora_rank"),
    "attention.key_length": _query_width, "rope.dimension_count": field("qk_rope_head_dim"),
}  # fmt: skip

_LLAMA = attrs.evolve(llama.LLAMA, defaults=llama.DEFAULTS | {"head_dim": None})
"""Layout of relatives that transformers does not know."""

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"} | {
    f"model.layers.{{}}.{name}": f"blk.{{}}.{target}"
    for name, target in {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items()
}
"""Names of a decoder's tensors, for architectures that gguf lacks."""


def _stack(settings: Settings) -> int:
    return int(settings.get("num_layers_per_stack") or settings["num_hidden_layers"])


def _stacks(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Blocks of the lower stack, then those of the higher."""
    n_stack = _stack(settings)
    higher = tuple((rf"^model\.H_module\.layers\.{i}\.", f"model.layers.{n_stack + i}.") for i in range(n_stack))
    return (*higher, (r"^model\.L_module\.", "model."), (r"\.attn\.", ".self_attn."))


CHECKPOINTS = (
    Checkpoint(
        "hrm_text", ("HrmTextForCausalLM",),
        {
            "block_count": lambda settings: _stack(settings) * settings["H_cycles"] * (settings["L_cycles"] + 1),
            "rope.dimension_count": head_dim, "embedding_scale": field("embedding_scale", kind=float),
            "hrm.layers_per_stack": _stack, "hrm.h_cycles": field("H_cycles"), "hrm.l_cycles": field("L_cycles"),
            "hrm.prefix_lm": lambda settings: bool(settings.get("prefix_lm", False)),
        },
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0, "H_cycles": 2, "L_cycles": 3},
        rename=_stacks, names="llama",
        tensors={"model.z_L_init": "hrm.z_l_init", "model.layers.{}.self_attn.gate_proj": "blk.{}.attn_gate"},
        split={
            r"\.gqkv_proj\.": tuple(f".{name}_proj." for name in ("gate", "q", "k", "v")),
            r"\.gate_up_proj\.": (".gate_proj.", ".up_proj."),
        },
    ),
    attrs.evolve(
        _LLAMA, classes=("Sarashina2VisionForCausalLM",), rename=((r"^llm\.", ""),), drop=(r"^norm\.",)
    ),
    attrs.evolve(
        _LLAMA, architecture="nanbeige", classes=("NanbeigeForCausalLM",), tensors=NAMES,
        keys=llama.KEYS | {
            "num_loops": lambda settings: max(int(settings.get("num_loops") or 1), 1),
            "skip_loop_final_norm": lambda settings: bool(settings.get("skip_loop_final_norm", False)),
        },
    ),
    attrs.evolve(
        _LLAMA, classes=("InternLM3ForCausalLM",), vocabulary=("sentencepiece",), tokenizer=_chat_end,
        extra=lambda settings: {},
        defaults={"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "head_dim": 128,
                  "rope_theta": 10000.0},
    ),
    Checkpoint(
        "minicpm", ("MiniCPMForCausalLM",),
        {
            "embedding_scale": field("scale_emb", kind=float),
            "residual_scale": lambda settings: settings["scale_depth"] / settings["num_hidden_layers"] ** 0.5,
            "logit_scale": lambda settings: settings["hidden_size"] / settings["dim_model_base"],
        },
        vocabulary=("sentencepiece",), convert=INTERLEAVED, extra=_factors(head_dim),
    ),
    Checkpoint(
        "minicpm3", ("MiniCPM3ForCausalLM",),
        _LATENT | _WITHOUT_ROPE | {"attention.value_length": None, "attention.q_lora_rank": field("q_lora_rank")},
        vocabulary=("sentencepiece",), extra=_factors(lambda settings: int(settings["qk_rope_head_dim"])),
    ),
    Checkpoint(
        "plm", ("PLMForCausalLM",), _LATENT | {"attention.value_length": field("v_head_dim")}, pre=("qwen2",)
    ),
    Checkpoint(
        "pangu-embedded", ("PanguEmbeddedForCausalLM",), llama.KEYS, {"head_dim": head_dim},
        vocabulary=("sentencepiece",), tokenizer=_space_prefix, drop=_tied_output,
    ),
    Checkpoint(
        "orion", ("OrionForCausalLM",),
        _WITHOUT_ROPE | {
            "tensor_data_layout": "Meta AI original pth",
            "context_length": field("max_sequence_length", "max_position_embeddings", "model_max_length"),
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": field("rms_norm_eps", kind=float),
        },
        {"num_key_value_heads": field("num_attention_heads")}, vocabulary=("sentencepiece",),
    ),
    Checkpoint(
        "baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        {
            "tensor_data_layout": "Meta AI original pth",
            "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
        },
        vocabulary=("sentencepiece",), convert=INTERLEAVED,
        split={r"\.W_pack\.": (".q_proj.", ".k_proj.", ".v_proj.")},
    ),
    Checkpoint(
        "bitnet", ("BitnetForCausalLM", "BitNetForCausalLM"),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        llama.DEFAULTS, ("sentencepiece",),
        convert=dict.fromkeys(
            (f"{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                           "ffn_down")),
            Conversion(_ternary, computes=True),
        ),
    ),
    Checkpoint(
        "xverse", ("XverseForCausalLM",),
        {"tensor_data_layout": "Meta AI original pth", "rope.dimension_count": head_dim},
        {"num_key_value_heads": field("num_attention_heads")},
        vocabulary=("byte_fallback",), tokenizer=lambda *given: {"tokenizer.ggml.scores": None}, convert=INTERLEAVED,
    ),
    Checkpoint(
        "refact", ("GPTRefactForCausalLM",),
        {
            "context_length": field("n_positions"), "feed_forward_length": _refact_width, "attention.head_count_kv": 1,
            "attention.layer_norm_epsilon": None,
            "attention.layer_norm_rms_epsilon": field("layer_norm_epsilon", kind=float),
        },
        pre=("refact",),
        split={
            r"\.attn\.kv\.": (".attn.k.", ".attn.v."),
            r"\.mlp\.gate_up_proj\.": (".mlp.gate_proj.", ".mlp.up_proj."),
        },
        tensors={
            f"transformer.h.{{}}.{name}": f"blk.{{}}.{target}"
            for name, target in {
                "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "mlp.gate_proj": "ffn_gate",
                "mlp.up_proj": "ffn_up",
            }.items()
        },
    ),
    Checkpoint(
        "openelm", ("OpenELMForCausalLM",),
        {
            "block_count": field("num_transformer_layers"), "context_length": field("max_context_length"),
            "embedding_length": field("model_dim"), "feed_forward_length": _widths,
            "attention.head_count": lambda settings: list(settings["num_query_heads"]),
            "attention.head_count_kv": lambda settings: list(settings["num_kv_heads"]),
            "rope.freq_base": field("rope_freq_constant", kind=float), "rope.dimension_count": field("head_dim"),
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        vocabulary=("sentencepiece",),
        split={r"\.ffn\.proj_1\.": (".ffn.gate_proj.", ".ffn.up_proj.")},
        tensors={
            f"transformer.layers.{{}}.ffn.{name}_proj": f"blk.{{}}.ffn_{name}" for name in ("gate", "up")
        },
    ),
    Checkpoint(
        "spark2_5", ("Spark2_5ForCausalLM",),
        {
            "vocab_size": _spark_vocabulary, "attention.sliding_window": field("sliding_window"),
            "attention.sliding_window_pattern": _is_sliding, "rope.dimension_count": _share("full_attention"),
            "rope.dimension_count_swa": _share("sliding_attention"),
        },
        pre=("qwen2",),
        tensors=NAMES | {
            "model.layers.{}.self_attn.q_k_v_proj": "blk.{}.attn_qkv",
            "model.layers.{}.self_attn.g_proj": "blk.{}.attn_gate",
        },
    ),
    Checkpoint(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration",),
        {
            "final_logit_softcapping": field("final_logit_softcapping", kind=float),
            "logit_scale": field("output_multiplier", kind=float), "attention.sliding_window": field("sliding_window"),
            "attention.sliding_window_pattern": _is_sliding,
        },
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 131072,
         "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
         "sliding_window": 2048, "layer_types": _glimmer_layers},
        pre=("llama-bpe",), tokenizer=_end_of_turn, extra=_glimmer_norms,
        tensors=NAMES | {
            "model.layers.{}.self_attn.gate_proj": "blk.{}.attn_gate",
            "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
            "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
            "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
        },
        convert=INTERLEAVED | dict.fromkeys(
            ("attn_norm.weight", "post_attention_norm.weight", "ffn_norm.weight", "post_ffw_norm.weight"), PLUS_ONE
        ),
    ),
    Checkpoint(
        "smallthinker", ("SmallThinkerForCausalLM",),
        {
            "expert_count": field("moe_num_primary_experts"),
            "expert_used_count": field("moe_num_active_primary_experts"),
            "feed_forward_length": field("moe_ffn_hidden_size"),
            "expert_feed_forward_length": field("moe_ffn_hidden_size"),
            "expert_gating_func": lambda settings: 1 if settings.get("moe_primary_router_apply_softmax") else 2,
            "attention.sliding_window": _window,
        },
        pre=("qwen2",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Llama, EAGLE-3 heads, Mistral, DBRX, Trinity and relatives."""

from collections.abc import Callable
from typing import Any

import attrs

from llamacli.plugin import (
    DRAFT_TOKENS,
    INTERLEAVED,
    Checkpoint,
    Conversion,
    Settings,
    field,
    head_dim,
    hookimpl,
    rope_of,
    wavelength_factors,
)

LLAMACLI_API = 1


def tokenizer_keys(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Keys of the tokenizer beside the vocabulary."""
    found: dict[str, Any] = {}
    if (add := tokenizer.get("add_prefix_space")) is not None:
        found["tokenizer.ggml.add_space_prefix"] = bool(add)
    if settings.get("vocab_size") == 32016:  # CodeLlama
        found["tokenizer.ggml.eot_token_id"] = 32010
    if settings.get("vocab_size") == 49152:  # Granite's small code models
        found["tokenizer.ggml.add_bos_token"] = False
    return found


DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": lambda settings: settings["num_attention_heads"], "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "head_dim": head_dim, "rope_theta": 10000.0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""Values of transformers' LlamaConfig."""

KEYS: dict[str, Any] = {"vocab_size": field("vocab_size"), "rope.dimension_count": head_dim}
PRE = ("llama-bpe", "smaug-bpe", "gpt-2", "qwen2")
VOCABULARY = ("sentencepiece", "byte_fallback", "bpe")


def _decoder(
    *classes: str,
    architecture: str = "llama",
    rename: tuple[tuple[str, str], ...] = (),
    drop: tuple[str, ...] = (),
    **defaults: Any,
) -> Checkpoint:
    return Checkpoint(
        architecture, classes, KEYS, DEFAULTS | defaults, VOCABULARY, PRE, tokenizer_keys, drop, rename,
        convert=INTERLEAVED, extra=wavelength_factors("llama3"),
    )  # fmt: skip


def _of_rope(name: str) -> Callable[[Settings], float | None]:
    """Number of RoPE, None where it is missing."""
    return lambda settings: None if (value := rope_of(settings).get(name)) is None else float(value)


def _part(config: str, name: str, kind: type = int) -> Callable[[Settings], Any]:
    """Value of a field inside a field of config.json."""
    return lambda settings: None if (value := settings[config].get(name)) is None else kind(value)


def _experts(shape: tuple[int, ...], settings: Settings) -> tuple[int, int, int]:
    """Shape of DBRX's experts, which are stored below each other."""
    ffn, n_embd = settings["ffn_config"], settings["d_model"]
    n_expert, n_ff = ffn["moe_num_experts"], ffn["ffn_hidden_size"]
    if shape != (n_expert * n_ff, n_embd):
        raise ValueError(f"shape {shape}, expected {(n_expert * n_ff, n_embd)}")
    return n_expert, n_ff, n_embd


_EXPERTS = Conversion(lambda array, settings: array.reshape(_experts(array.shape, settings)), _experts)
_DOWN = Conversion(
    lambda array, settings: array.reshape(_experts(array.shape, settings)).swapaxes(1, 2),
    lambda shape, settings: tuple(_experts(shape, settings)[i] for i in (0, 2, 1)),
)


# --- EAGLE-3 ---


def _layers(settings: Settings) -> list[int]:
    """Layers of the model whose inputs the head reads."""
    n_layer = settings["base"]["num_hidden_layers"]
    found = settings.get("eagle_aux_hidden_state_layer_ids") or [2, n_layer // 2, n_layer - 3]
    if not all(0 <= layer <= n_layer for layer in found):
        raise ValueError(f"the head reads layers {found}, and its model has {n_layer}")
    return list(found)


_EAGLE3 = Checkpoint(
    "eagle3", ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    KEYS | {
        "target_layers": _layers,
        "target_hidden_size": lambda settings: settings.get("target_hidden_size") or settings["base"]["hidden_size"],
        "norm_before_residual": lambda settings: bool(settings.get("norm_before_residual")),
        "norm_before_fc": lambda settings: bool(settings.get("norm_before_fc")),
    },
    DEFAULTS, VOCABULARY, PRE, drop=(r"^t2d$",),
    rename=((r"^(?:midlayer|layers\.0)\.", "model.layers.0."), (r"^input_norm\.", "enc.output_norm.")),
    tensors={
        "fc": "fc", "d2t": "d2t", "enc.output_norm": "enc.output_norm",
        "model.layers.{}.hidden_norm": "blk.{}.attn_norm_2",
    },
    convert=INTERLEAVED | {"d2t": DRAFT_TOKENS}, extra=wavelength_factors("llama3"), names="llama", is_draft=True,
)  # fmt: skip


def _llama_or_head(settings: Settings) -> Checkpoint:
    """Layout of a model, or of an EAGLE-3 head, of Llama's class."""
    is_head = "draft_vocab_size" in settings and settings.get("num_hidden_layers") == 1
    return _EAGLE3 if is_head else LLAMA


LLAMA = _decoder("LlamaForCausalLM", "LLaMAForCausalLM", "IQuestCoderForCausalLM")

CHECKPOINTS = (
    attrs.evolve(LLAMA, variant=_llama_or_head),
    _EAGLE3,
    _decoder("LlamaModel", rename=((r"^(?!model\.|lm_head)", "model."),)),
    _decoder("LlamaBidirectionalModel", architecture="llama-embed"),
    _decoder(
        "LlavaForConditionalGeneration", "VoxtralForConditionalGeneration", "VLlama3ForCausalLM",
        "SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration",
        rename=((r"text_model\.", ""),), hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32,
    ),
    _decoder(
        "JanusForConditionalGeneration", drop=(r"^model\.(aligner|vqmodel|generation_\w+)\.",),
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    ),
    _decoder(
        "SmolLM3ForCausalLM", architecture="smollm3", max_position_embeddings=32768, num_key_value_heads=4,
        rope_theta=2e6, head_dim=None,
    ),
    _decoder(
        "ArceeForCausalLM", architecture="arcee", max_position_embeddings=4096, rms_norm_eps=1e-5,
    ),
    Checkpoint(
        "seed_oss", ("SeedOssForCausalLM",), {},
        {"num_key_value_heads": 8, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "head_dim": 128,
         "rope_theta": 10000.0},
        pre=("seed-coder", "qwen2"),
    ),
    Checkpoint("maincoder", ("MaincoderForCausalLM",), {"rope.dimension_count": field("head_dim")}),
    _decoder("MistralForCausalLM", max_position_embeddings=131072, num_key_value_heads=8),
    _decoder(
        "MixtralForCausalLM", max_position_embeddings=131072, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6, head_dim=None,
    ),
    Checkpoint(
        "mistral3", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        KEYS | {
            "rope.scaling.yarn_log_multiplier": _of_rope("mscale_all_dim"),
            "attention.temperature_scale": _of_rope("llama_4_scaling_beta"),
        },
        DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
        VOCABULARY, PRE, tokenizer_keys, convert=INTERLEAVED, extra=wavelength_factors("llama3"),
    ),
    Checkpoint(
        "dbrx", ("DbrxForCausalLM",),
        {
            "context_length": field("max_seq_len"), "embedding_length": field("d_model"),
            "feed_forward_length": _part("ffn_config", "ffn_hidden_size"),
            "attention.head_count_kv": _part("attn_config", "kv_n_heads"),
            "attention.clamp_kqv": _part("attn_config", "clip_qkv", float),
            "rope.freq_base": _part("attn_config", "rope_theta", float), "attention.layer_norm_epsilon": 1e-5,
            "expert_count": _part("ffn_config", "moe_num_experts"),
            "expert_used_count": _part("ffn_config", "moe_top_k"),
        },
        pre=("dbrx",), rename=((r"(\.experts\.mlp\.\w+)$", r"\1.weight"),),
        convert={"ffn_gate_exps.weight": _EXPERTS, "ffn_up_exps.weight": _EXPERTS, "ffn_down_exps.weight": _DOWN},
    ),
    Checkpoint(
        "afmoe", ("AfmoeForCausalLM",),
        KEYS | {
            "expert_shared_count": field("num_shared_experts"), "leading_dense_block_count": field("num_dense_layers"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_weights_norm": field("route_norm", kind=bool), "expert_weights_scale": field("route_scale",
            kind=float),
            "attention.sliding_window": field("sliding_window"),
        },
        DEFAULTS | {"score_func": "sigmoid", "rms_norm_eps": 1e-5},
        VOCABULARY, PRE, tokenizer_keys, rename=((r"\.expert_bias$", ".expert_bias.bias"),),
        extra=wavelength_factors("llama3"),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

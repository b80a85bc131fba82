"""Hugging Face checkpoints of Llama, Mistral, Mixtral, Trinity and relatives."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, field, head_dim, hookimpl, rope_of, wavelength_factors

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


CHECKPOINTS = (
    _decoder("LlamaForCausalLM", "LLaMAForCausalLM", "IQuestCoderForCausalLM"),
    _decoder("LlamaModel", rename=((r"^(?!model\.|lm_head)", "model."),)),
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

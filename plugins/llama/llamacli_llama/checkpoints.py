"""Hugging Face checkpoints of Llama, Mistral, Mixtral and relatives."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, hookimpl, rope_of

LLAMACLI_API = 1


def head_dim(settings: Settings) -> int:
    """Width of a head, by default a share of the hidden size."""
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def rope_factors(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    """Factors of Llama 3's RoPE scaling, float32 [head_dim / 2]."""
    rope = rope_of(settings)
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return {}
    dim, base = head_dim(settings), rope.get("rope_theta", 10000.0)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = np.float32(1) / np.power(np.float32(base), exponents, dtype=np.float32)
    factor, n_old = rope.get("factor", 8.0), rope.get("original_max_position_embeddings", 8192)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)

    def scale(frequency: float) -> float:
        wavelength = np.float32(2 * math.pi) / np.float32(frequency)
        if wavelength < n_old / high:
            return 1.0
        if wavelength > n_old / low:
            return float(factor)
        smooth = (np.float32(n_old) / wavelength - np.float32(low)) / np.float32(high - low)
        return float(1 / ((1 - smooth) / np.float32(factor) + smooth))

    return {"rope_freqs.weight": np.array([scale(x) for x in frequencies], np.float32)}


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

KEYS: dict[str, Any] = {"vocab_size": lambda settings: settings["vocab_size"], "rope.dimension_count": head_dim}
PRE = ("llama-bpe", "smaug-bpe", "gpt-2", "qwen2")
VOCABULARY = ("sentencepiece", "byte_fallback", "bpe")


def _decoder(*classes: str, architecture: str = "llama", **defaults: Any) -> Checkpoint:
    return Checkpoint(
        architecture, classes, KEYS, DEFAULTS | defaults, VOCABULARY, PRE, tokenizer_keys, convert=INTERLEAVED,
        extra=rope_factors, rename=((r"^(?!model\.|lm_head)", "model."),) if classes == ("LlamaModel",) else (),
    )  # fmt: skip


CHECKPOINTS = (
    _decoder("LlamaForCausalLM", "LLaMAForCausalLM", "IQuestCoderForCausalLM"),
    _decoder("LlamaModel"),
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
    _decoder("MistralForCausalLM", max_position_embeddings=131072, num_key_value_heads=8),
    _decoder(
        "MixtralForCausalLM", max_position_embeddings=131072, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6, head_dim=None,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

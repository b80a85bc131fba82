"""Hugging Face checkpoints of Gemma 1 to 3 and 3n, text."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from llamacli.plugin import PLUS_ONE, Checkpoint, Conversion, Settings, field, hookimpl

LLAMACLI_API = 1

_NORMS = (
    "output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm",
)  # fmt: skip
_CONVERT = {f"{name}.weight": PLUS_ONE for name in _NORMS}
_WITHOUT_ROPE: dict[str, Any] = {"rope.freq_base": None, "rope.scaling.type": None, "rope.scaling.factor": None}
"""Keys that files of the first two lack: the models have one base."""

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256}


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_space_prefix": False} if kind == "sentencepiece" else {}


def _gemma1(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.eot_token_id": 107}


def _window(settings: Settings) -> int | None:
    return None if settings.get("sliding_window_pattern") == 1 else int(settings["sliding_window"])


def _sparsity(settings: Settings) -> list[float]:
    """Quantiles of the normal distribution, in the single precision of torch."""
    root, found = np.float32(np.sqrt(2)), []
    for share in settings["activation_sparsity_pattern"]:
        inside = 0 < np.float32(share) < 1
        x = np.float32(2) * np.float32(share) - np.float32(1)
        value = np.float32(NormalDist().inv_cdf((float(x) + 1) / 2) / np.sqrt(2)) if inside else x * np.float32(np.inf)
        found.append(float(value * root))
    return found


def _padded(array: Any, settings: Settings) -> Any:
    """Rows of pictures and sound, which the table has none of."""
    rows = np.zeros(_size(array.shape, settings), array.dtype)
    rows[: len(array)] = array
    return rows


def _size(shape: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    return max(shape[0], settings["vocab_size"]), *shape[1:]


CHECKPOINTS = (
    Checkpoint(
        "gemma", ("GemmaForCausalLM",), _WITHOUT_ROPE, _DEFAULTS, ("sentencepiece",), tokenizer=_gemma1,
        drop=(r"^lm_head\.weight$",), convert=_CONVERT,
    ),
    Checkpoint(
        "gemma2", ("Gemma2ForCausalLM",),
        _WITHOUT_ROPE | {
            "attn_logit_softcapping": lambda settings: float(settings["attn_logit_softcapping"]),
            "final_logit_softcapping": lambda settings: float(settings["final_logit_softcapping"]),
            "attention.sliding_window": lambda settings: int(settings["sliding_window"]),
        },
        _DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        ("sentencepiece",), tokenizer=_space_prefix, drop=(r"^lm_head\.weight$",), convert=_CONVERT,
    ),
    Checkpoint(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {
            "final_logit_softcapping": lambda settings: settings.get("final_logit_softcapping"),
            "attention.sliding_window": _window,
        },
        {
            "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "rms_norm_eps": 1e-6, "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        },
        ("sentencepiece", "bpe"), tokenizer=_space_prefix, convert=_CONVERT,
    ),
    Checkpoint(
        "gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        {
            "final_logit_softcapping": lambda settings: settings.get("final_logit_softcapping"),
            "attention.sliding_window": _window, "altup.active_idx": field("altup_active_idx"),
            "altup.num_inputs": field("altup_num_inputs"),
            "embedding_length_per_layer_input": field("hidden_size_per_layer_input"),
            "attention.shared_kv_layers": field("num_kv_shared_layers"), "activation_sparsity_scale": _sparsity,
            "attention.sliding_window_pattern": lambda settings: [
                kind == "sliding_attention" for kind in settings["layer_types"]
            ],
        },
        {"rms_norm_eps": 1e-6, "sliding_window": 512, "altup_active_idx": 0, "altup_num_inputs": 4,
         "vocab_size": 262400, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
        ("sentencepiece", "bpe"), tokenizer=_space_prefix, rename=((r"_scale$", "_scale.weight"),),
        convert=dict.fromkeys(
            ("token_embd.weight", "per_layer_token_embd.weight"), Conversion(_padded, _size)
        ),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

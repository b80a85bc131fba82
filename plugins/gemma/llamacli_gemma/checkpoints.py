"""Hugging Face checkpoints of Gemma 1 to 4 and 3n, text."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import attrs
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


def _full(settings: Settings, name: str, inner: str) -> int | None:
    """Number of layers with full attention: its field, else `per_layer_config`."""
    if settings.get(name) is not None:
        return int(settings[name])
    kinds = settings["layer_types"]
    of_layers = (settings.get("per_layer_config") or {}).items()
    found = (fields[inner] for i, fields in of_layers if kinds[int(i)] == "full_attention" and inner in fields)
    return next(found, None)


def _full_width(settings: Settings) -> int:
    width = _full(settings, "global_head_dim", "head_dim")
    if width is None:
        raise KeyError("global_head_dim")
    return width


def _slides(settings: Settings) -> list[bool]:
    return [kind == "sliding_attention" for kind in settings["layer_types"]]


def _n_head_kv(settings: Settings) -> int | list[int]:
    n_local, n_full = (
        settings["num_key_value_heads"],
        _full(settings, "num_global_key_value_heads", "num_key_value_heads"),
    )
    return n_local if n_full is None else [n_local if slides else n_full for slides in _slides(settings)]


def _n_ff(settings: Settings) -> int | list[int]:
    n_ff, n_layer = int(settings["intermediate_size"]), settings["num_hidden_layers"]
    if not settings.get("use_double_wide_mlp"):
        return n_ff
    own = n_layer - settings["num_kv_shared_layers"]
    return [n_ff if i < own else 2 * n_ff for i in range(n_layer)]


def _rope_freqs(settings: Settings) -> dict[str, Any]:
    """Factors of full attention: 1, and 1e30 of pairs without an angle."""
    half = _full_width(settings) // 2
    share = settings["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    factors = np.full(half, 1e30, np.float32)
    factors[: int(2 * half * share / 2)] = 1
    return {"rope_freqs.weight": factors}


def _always_bos(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True}


def _suppressed(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return _always_bos(kind, tokenizer, settings) | {
        "tokenizer.ggml.suppress_tokens": settings["generation"].get("suppress_tokens")
    }


_READ_BY_PARSERS = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
)  # fmt: skip
"""Special tokens of Gemma 4 that parsers of chats read."""

_ASSISTANT = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
} | {
    f"model.layers.{{}}.{name}": f"blk.{{}}.{target}"
    for name, target in (
        ("input_layernorm", "attn_norm"), ("layer_scalar", "layer_output_scale"), ("self_attn.q_proj", "attn_q"),
        ("self_attn.q_norm", "attn_q_norm"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
    )
}  # fmt: skip
"""Names of a draft head's tensors, of which gguf 0.19 has no map."""

_GEMMA3 = Checkpoint(
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
)  # fmt: skip
_GEMMA4 = Checkpoint(
    "gemma4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    {
        "final_logit_softcapping": lambda settings: settings.get("final_logit_softcapping"),
        "attention.sliding_window": field("sliding_window"), "attention.sliding_window_pattern": _slides,
        "attention.shared_kv_layers": field("num_kv_shared_layers"), "attention.head_count_kv": _n_head_kv,
        "attention.key_length": _full_width, "attention.value_length": _full_width,
        "attention.key_length_swa": field("head_dim"), "attention.value_length_swa": field("head_dim"),
        "rope.dimension_count": _full_width, "rope.dimension_count_swa": field("head_dim"),
        "embedding_length_per_layer_input": lambda settings: settings.get("hidden_size_per_layer_input") or 0,
        "expert_feed_forward_length": field("expert_intermediate_size", "moe_intermediate_size"),
        "feed_forward_length": _n_ff,
    },
    {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_kv_shared_layers": 0},
    ("ranked",), user_defined=_READ_BY_PARSERS, tokenizer=_always_bos, extra=_rope_freqs,
    rename=((r"(\.layer_scalar|\.experts\.\w+_proj)$", r"\1.weight"),),
    tensors={
        "model.layers.{}.router.scale": "blk.{}.ffn_gate_inp.scale",
        "model.layers.{}.router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
    },
)  # fmt: skip

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
    _GEMMA3,
    attrs.evolve(
        _GEMMA3, architecture="gemma-embedding", classes=("Gemma3TextModel",),
        keys={**_GEMMA3.keys, "attention.sliding_window": field("sliding_window"), "pooling_type": field("pooling")},
    ),
    Checkpoint(
        "gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        {
            "final_logit_softcapping": lambda settings: settings.get("final_logit_softcapping"),
            "attention.sliding_window": _window, "altup.active_idx": field("altup_active_idx"),
            "altup.num_inputs": field("altup_num_inputs"),
            "embedding_length_per_layer_input": field("hidden_size_per_layer_input"),
            "attention.shared_kv_layers": field("num_kv_shared_layers"), "activation_sparsity_scale": _sparsity,
            "attention.sliding_window_pattern": _slides,
        },
        {"rms_norm_eps": 1e-6, "sliding_window": 512, "altup_active_idx": 0, "altup_num_inputs": 4,
         "vocab_size": 262400, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
        ("sentencepiece", "bpe"), tokenizer=_space_prefix, rename=((r"_scale$", "_scale.weight"),),
        convert=dict.fromkeys(
            ("token_embd.weight", "per_layer_token_embd.weight"), Conversion(_padded, _size)
        ),
    ),
    _GEMMA4,
    attrs.evolve(_GEMMA4, classes=("Gemma4UnifiedForConditionalGeneration",), tokenizer=_suppressed),
    attrs.evolve(
        _GEMMA4, architecture="gemma4-assistant",
        classes=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        keys={
            **_GEMMA4.keys, "embedding_length_out": field("backbone_hidden_size"),
            "nextn_predict_layers": field("num_hidden_layers"),
        },
        drop=(r"masked_embedding",), tensors=_ASSISTANT,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of DFlash, DFlash 2 and DSpark heads."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import DRAFT_TOKENS, Checkpoint, Conversion, Settings, field, head_dim, n_blocks, rope_of


def _field(name: str, kind: Callable[[Any], Any]) -> Callable[[Settings], Any]:
    """Value of a field of dflash_config, or of config.json; None without."""

    def value(settings: Settings) -> Any:
        found = (settings.get("dflash_config") or {}).get(name, settings.get(name))
        return None if found is None else kind(found)

    return value


def _n_rotated(settings: Settings) -> int | None:
    share = rope_of(settings).get("partial_rotary_factor")
    return None if share is None else int(head_dim(settings) * share)


def _layers(settings: Settings) -> list[int] | None:
    """Layers whose inputs are read; config.json numbers them by their outputs."""
    if "dflash_config" not in settings and "aux_hidden_state_layer_ids" in settings:
        return list(settings["aux_hidden_state_layer_ids"])
    return [i + 1 for i in _field("target_layer_ids", list)(settings) or ()] or None


def _windows(settings: Settings) -> list[bool] | None:
    """True for blocks with a window; None for a head without any."""
    if not _window(settings):
        return None
    kinds = settings.get("layer_types") or [""] * n_blocks(settings)
    return [bool(_field("use_swa", bool)(settings)) or kind == "sliding_attention" for kind in kinds]


def _window(settings: Settings) -> int | None:
    window = _field("swa_window_size", int)(settings) or settings.get("sliding_window")
    return window if settings.get("use_sliding_window") or _field("use_swa", bool)(settings) else None


def _causal(settings: Settings) -> bool | None:
    found = settings.get("is_causal")
    return _field("causal", bool)(settings) if found is None else bool(found)


def _sections(settings: Settings) -> list[int] | None:
    """Sections of RoPE, of the time alone, for a model with some."""
    rope = settings["base"].get("rope_parameters") or settings["base"].get("rope_scaling") or {}
    return [head_dim(settings) // 2, 0, 0, 0] if "mrope_section" in rope else None


def _softcap(settings: Settings) -> float | None:
    return _field("final_logit_softcapping", float)(settings) or None


def _mask(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Token of masks; ValueError for a pickled embedding."""
    if (settings["folder"] / "mask_embedding.pt").is_file():
        raise ValueError("mask_embedding.pt is a pickle, which could run code; the head needs the embedding in it")
    mask = _field("mask_token_id", int)(settings)
    return {} if mask is None else {"tokenizer.ggml.mask_token_id": mask}


def _halves(array: Any, settings: Settings) -> Any:
    """Rows for RoPE that rotates halves, where the original rotates pairs."""
    if settings.get("rope_is_neox_style", True):
        return array
    return array.reshape(-1, settings["head_dim"] // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _unread(settings: Settings) -> tuple[str, ...]:
    """Tensors that the model has too."""
    return (r"embed_tokens\.weight$",) if settings.get("has_embed_tokens") is False else ()


_KEYS: dict[str, Any] = {
    "rope.dimension_count": _n_rotated, "rope.dimension_sections": _sections,
    "attention.value_scale": _field("attention_value_scale", float), "attention.causal": _causal,
    "attention.sliding_window": _window, "attention.sliding_window_pattern": _windows,
    "block_size": lambda settings: _field("block_size", int)(settings) or 16, "target_layers": _layers,
    "conv_kernel_size": _field("conv_kernel_size", int), "conv_group_size": _field("conv_group_size", int),
    "selector_rank": _field("selector_rank", int), "selector_top_k": _field("selector_top_k", int),
    "logit_scale": _field("output_multiplier", float), "final_logit_softcapping": _softcap,
    "embedding_scale": _field("input_embedding_scale", float),
}  # fmt: skip
_RENAME = (
    (r"^(?!model\.)", "model."), (r"(sink\w*|_codebook)$", r"\1.weight"), (r"^model\.d2t$", "d2t"),
)  # fmt: skip
_TENSORS = {
    "model.fc": "fc", "d2t": "d2t", "model.hidden_norm": "enc.output_norm", "model.lm_head": "output",
    **{f"model.layers.{{}}.self_attn.{name}": "blk.{}.attn_sinks"
       for name in ("sinks", "attention_sink_bias", "learnable_sink_param")},
    **{f"model.layers.{{}}.{branch}_conv.{name}": f"blk.{{}}.{short}_conv_{end}"
       for branch, short in (("attention", "attn"), ("mlp", "ffn"))
       for name, end in (("base_kernel", "base"), ("kernel_projection", "proj"))},
    **{f"model.candidate_selector.{name}": f"selector_{short}"
       for name, short in (("predecessor_codebook", "predecessor"), ("successor_codebook", "successor"),
                           ("hidden_projection", "hidden"))},
    **{f"model.markov_head.markov_w{i}": f"markov_w{i}" for i in (1, 2)},
    "model.confidence_head.proj": "conf_proj",
}  # fmt: skip
_ROWS = {f"attn_{name}.weight": Conversion(_halves) for name in ("q", "k", "q_norm", "k_norm")}


def _n_draft(settings: Settings) -> int:
    """Number of tokens that a DSpark head predicts."""
    n_vocab = settings["vocab_size"]
    found = int(settings.get("draft_vocab_size") or n_vocab)
    if found > n_vocab:
        raise ValueError(f"draft_vocab_size {found} is more than vocab_size {n_vocab}")
    if found < n_vocab and "d2t" not in settings["tensor_names"]:
        raise ValueError(f"draft_vocab_size {found} is less than vocab_size {n_vocab}, and there is no tensor 'd2t'")
    if (kind := settings.get("markov_head_type", "vanilla")) != "vanilla":
        raise ValueError(f"markov_head_type {kind!r} is not vanilla")
    return found


def _unread_by_dspark(settings: Settings) -> tuple[str, ...]:
    head = (r"lm_head\.weight$",) if _n_draft(settings) == settings["vocab_size"] else ()
    return (*_unread(settings), *head, r"^t2d$")


def _from_anchor(settings: Settings) -> bool:
    """True if the row of the last token predicts, as DFlash's does."""
    ours = "transformer_layer_config" not in settings and "aux_hidden_state_layer_ids" not in settings
    return bool(settings.get("sample_from_anchor", ours))


_DSPARK_KEYS: dict[str, Any] = {
    "sample_from_anchor": _from_anchor,
    "has_confidence_head": lambda settings: any(
        re.search(r"confidence_(head\.)?proj", name) for name in settings["tensor_names"]
    ),
}  # fmt: skip


# --- Gemma 4 ---


_GEMMA_DEFAULTS: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "attention_k_eq_v": False, "layer_types": None, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "enable_moe_block": False, "final_logit_softcapping": None, "markov_head_type": "vanilla",
    "draft_vocab_size": lambda settings: settings["vocab_size"],
}  # fmt: skip
_GEMMA_ONLY: dict[str, Any] = {
    "attention_k_eq_v": True, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "enable_moe_block": False, "final_logit_softcapping": None, "markov_head_type": "vanilla",
}  # fmt: skip
"""Values of fields that the architecture needs."""


def _gemma_factors(settings: Settings) -> dict[str, Any]:
    """Factors of RoPE, huge ones for columns that are not rotated."""
    rope = rope_of(settings)
    if rope["rope_type"] != "proportional":
        return {}
    n_half = int(settings["global_head_dim"]) // 2
    n_rotated = int(n_half * rope.get("partial_rotary_factor", 0.25))
    return {"rope_freqs.weight": np.repeat(np.array([1, 1e30], np.float32), [n_rotated, n_half - n_rotated])}


def _gemma_rename(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Renamings; ValueError for what the architecture lacks."""
    expected = _GEMMA_ONLY | {
        "layer_types": ["full_attention"] * n_blocks(settings), "draft_vocab_size": settings["vocab_size"],
    }  # fmt: skip
    for name, value in expected.items():
        if settings[name] != value:
            raise ValueError(f"{name} is {settings[name]!r}, and such heads have {value!r}")
    return (*_RENAME, (r"\.layer_scalar$", ".layer_scalar.weight"), (r"\.confidence_proj\.", ".confidence_head.proj."))


def checkpoints(defaults: Settings, pre: tuple[str, ...]) -> tuple[Checkpoint, ...]:
    """The layouts."""
    given: dict[str, Any] = {
        "tokenizer": _mask, "rename": _RENAME, "tensors": _TENSORS, "names": "qwen3", "pre": pre, "is_draft": True,
        "defaults": defaults,
    }  # fmt: skip
    gemma = {**given, "defaults": _GEMMA_DEFAULTS, "extra": _gemma_factors, "rename": _gemma_rename}
    gemma["tensors"] = _TENSORS | {
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
        "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
        "model.layers.{}.layer_scalar": "blk.{}.layer_output_scale",
    }
    muse = {**defaults, "use_sliding_window": lambda settings: "layer_types" in settings}
    return (
        Checkpoint(
            "dflash", ("DFlashDraftModel", "DFlash2DraftModel"), _KEYS, drop=_unread, convert=_ROWS, **given
        ),
        Checkpoint(
            "dflash", ("Gemma4DSparkModel",),
            _KEYS | _DSPARK_KEYS | {
                "attention.head_count_kv": field("num_global_key_value_heads"),
                "attention.key_length": field("global_head_dim"), "attention.value_length": field("global_head_dim"),
                "rope.dimension_count": field("global_head_dim"), "attention.scale": 1.0,
                "embedding_scale": lambda settings: settings["hidden_size"] ** 0.5,
                "hidden_activation": "gelu_pytorch_tanh",
                "sample_from_anchor": lambda settings: bool(settings.get("sample_from_anchor", True)),
            },
            drop=_unread, **gemma,
        ),
        Checkpoint("dflash", ("MuseGlimmerAssistantModel",), _KEYS, **given | {"defaults": muse}),
        Checkpoint(
            "dflash",
            ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "LingDSparkModel"),
            _KEYS | _DSPARK_KEYS,
            drop=_unread_by_dspark, convert=_ROWS | {"d2t": DRAFT_TOKENS}, **given,
        ),
    )  # fmt: skip

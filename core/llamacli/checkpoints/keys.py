"""GGUF keys of a checkpoint: those of config.json, names, sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from llamacli.checkpoints.layout import Checkpoint, Settings
from llamacli.errors import ModelFormatError
from llamacli.util.files import read_json

_log = logging.getLogger(__name__)
_F32 = np.dtype(np.float32)

_COMMON: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("block_count", int, ("n_layers", "num_hidden_layers", "n_layer", "num_layers")),
    (
        "context_length", int,
        ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length", "model_max_length"),
    ),
    ("embedding_length", int, ("hidden_size", "n_embd", "dim")),
    (
        "feed_forward_length", int,
        ("prefix_dense_intermediate_size", "dense_intermediate_size", "intermediate_size", "n_inner", "hidden_dim"),
    ),
    ("attention.head_count", int, ("num_attention_heads", "n_head", "n_heads")),
    ("attention.head_count_kv", int, ("num_key_value_heads", "n_kv_heads")),
    ("attention.layer_norm_rms_epsilon", float, ("rms_norm_eps", "norm_eps")),
    ("attention.layer_norm_epsilon", float, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    ("expert_count", int, ("num_local_experts", "num_experts", "n_routed_experts")),
    ("expert_used_count", int, ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")),
    ("expert_group_count", int, ("n_group",)),
    ("expert_group_used_count", int, ("topk_group",)),
    ("attention.key_length", int, ("head_dim",)),
    ("attention.value_length", int, ("head_dim",)),
)  # fmt: skip
"""Keys of all architectures: name, type, and fields of config.json, of which the first that is there counts."""

_SCORES = ("score_function", "scoring_func", "score_func", "moe_router_activation", "moe_router_activation_func",
           "expert_selection_fn")  # fmt: skip
_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}

_ROPE_THETA = ("global_rope_theta", "rope_global_theta", "rope_theta_global", "rope_theta", "rotary_emb_base")
_LOCAL_THETA = ("local_rope_theta", "rope_local_theta", "rope_theta_local", "swa_rope_theta", "rope_local_base_freq")
_MIRRORED = {
    "partial_rotary_factor": ("partial_rotary_factor", "rope_pct", "rope_percent"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
ROPE_FIELDS = frozenset(
    ("rope_scaling", "rope_parameters", *_ROPE_THETA, *_LOCAL_THETA, *(name for x in _MIRRORED.values() for name in x))
)
"""Fields of config.json that become RoPE parameters."""
_YARN = {
    "yarn_ext_factor": ("extrapolation_factor",), "yarn_attn_factor": ("attention_factor", "attn_factor"),
    "yarn_beta_fast": ("beta_fast",), "yarn_beta_slow": ("beta_slow",),
}  # fmt: skip


def first(settings: Settings, *fields: str) -> Any:
    """Value of the first of these fields that is there, else None."""
    return next((settings[field] for field in fields if field in settings), None)


def settings_of(config: Mapping[str, Any], checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Fields of config.json with defaults; `rope_parameters` are completed."""
    settings = dict(config)
    for field, value in checkpoint.defaults.items():
        if settings.get(field) is None:
            settings[field] = value_of(value, settings, f"{source}: for field {field}")
    rope = settings.get("rope_parameters", settings.get("rope_scaling")) or {}
    if not isinstance(rope, dict):
        raise ModelFormatError(f"{source}: rope_scaling is {rope!r}, expected an object")
    rope = dict(rope)
    if not rope.keys() & {"full_attention", "sliding_attention"}:
        if (local := first(settings, *_LOCAL_THETA)) is not None:
            rope["sliding_attention"] = {"rope_theta": local}
        if (theta := first(settings, *_ROPE_THETA)) is not None:
            rope.setdefault("rope_theta", theta[0] if theta and isinstance(theta, list) else theta)
        if (kind := rope.get("type")) is not None:
            rope.setdefault("rope_type", kind)
        for field, names in _MIRRORED.items():
            if (value := first(settings, *names)) is not None:
                rope.setdefault(field, value)
    return settings | {"rope_parameters": rope}


def rope_of(settings: Settings) -> dict[str, Any]:
    """RoPE parameters of layers with full attention."""
    rope = settings["rope_parameters"]
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def configured_keys(settings: Settings, checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Keys of the architecture; ModelFormatError naming the field that is wrong."""
    found: dict[str, Any] = {}
    for key, kind, fields in _COMMON:
        value = first(settings, *fields)
        if value is not None and not isinstance(value, list):
            found[key] = _typed(value, kind, fields, source)
        elif value is not None:
            found[key] = [_typed(item, kind, fields, source) for item in value]
    if settings.get("is_causal") is False:
        found["attention.causal"] = False
    if (score := first(settings, *_SCORES)) is not None:
        if score not in _GATING:
            raise ModelFormatError(f"{source}: the scoring function {score!r} is not one of {', '.join(_GATING)}")
        found["expert_gating_func"] = _GATING[score]
    try:
        found |= _rope_keys(settings)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelFormatError(f"{source}: rope_scaling: {type(error).__name__}: {error}") from error
    for key, value in checkpoint.keys.items():
        found[key] = value_of(value, settings, f"{source}: for key {key}")
    return {f"{checkpoint.architecture}.{key}": value for key, value in found.items() if value is not None}


def value_of(value: Any, settings: Settings, place: str) -> Any:
    """Value of a plugin's table, or of its function.

    ModelFormatError that begins with `place` for one that fails.
    """
    try:
        return value(settings) if callable(value) else value
    except ModelFormatError:
        raise
    except KeyError as error:
        raise ModelFormatError(f"{place}: {error} is missing") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelFormatError(f"{place}: {type(error).__name__}: {error}") from error


def _typed(value: Any, kind: type, fields: tuple[str, ...], source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
        raise ModelFormatError(f"{source}: `{fields[0]}` is {value!r}, expected {kind.__name__}")
    return kind(value)


def _rope_keys(settings: Settings) -> dict[str, Any]:
    parameters, rope = settings["rope_parameters"], rope_of(settings)
    found: dict[str, Any] = {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in ("linear", "yarn") and factor is not None:
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind == "yarn" and factor is not None:
        found["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        for key, fields in _YARN.items():
            if (value := first(rope, *fields)) is not None:
                found[f"rope.scaling.{key}"] = float(value)
    if kind in ("su", "longrope"):
        found["rope.scaling.type"] = "longrope"
    if sections := parameters.get("mrope_section"):
        found["rope.dimension_sections"] = [*sections, 0, 0, 0, 0][:4]
    if (theta := rope.get("rope_theta")) is not None:
        found["rope.freq_base"] = float(theta)
    if (theta := parameters.get("sliding_attention", {}).get("rope_theta")) is not None:
        found["rope.freq_base_swa"] = float(theta)
    return found


def general_keys(
    path: Path, architecture: str, shapes: Mapping[str, tuple[int, ...]], file_type: int | None
) -> dict[str, Any]:
    """Keys `general.*`: names and sizes by gguf's heuristics, sampling defaults.

    Those of an adapter without `file_type`.
    """
    writer = gguf.GGUFWriter(None, architecture)
    for name, shape in shapes.items():
        writer.add_tensor_info(name, shape, _F32, 0)
    total, shared, expert, n_expert = writer.get_total_parameter_count()
    try:
        metadata = gguf.Metadata.load(None, path, None, total)
    except Exception as error:
        _log.warning("%s: names cannot be read: %s: %s", path, type(error).__name__, error)
        metadata = gguf.Metadata()
    if metadata.name is None:
        metadata.name = path.resolve().name
    if metadata.size_label is None and total > 0:
        metadata.size_label = gguf.size_label(total, shared, expert, n_expert)
    generation = read_json(path / "generation_config.json")
    if metadata.sampling_penalty_repeat is None:  # gguf before 0.20 reads penalty_repeat only
        metadata.sampling_penalty_repeat = generation.get("repetition_penalty")
    writer.add_type(gguf.GGUFType.ADAPTER if file_type is None else gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)
    casts = {gguf.GGUFValueType.FLOAT32: float, gguf.GGUFValueType.INT32: np.int32}
    found = {key: casts.get(pair.type, lambda x: x)(pair.value) for key, pair in writer.kv_data[0].items()}
    kind = {} if file_type is None else {"general.file_type": file_type}
    return found | kind | {"general.quantization_version": gguf.GGML_QUANT_VERSION}

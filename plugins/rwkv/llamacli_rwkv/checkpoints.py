"""Hugging Face checkpoints of RWKV-6, QRWKV-6, RWKV-7 and ARWKV-7."""

import math
from collections.abc import Callable
from typing import Any

from llamacli.plugin import TRANSPOSED, Checkpoint, Conversion, Settings, field, hookimpl
from llamacli_rwkv.vocabulary import world

LLAMACLI_API = 1

Shape = tuple[int, ...]

_COMMON: dict[str, Any] = {
    "context_length": 1048576, "attention.head_count": 0, "attention.head_count_kv": None,
    "attention.key_length": None, "attention.value_length": None, "attention.layer_norm_rms_epsilon": None,
    "rope.freq_base": None, "rope.scaling.type": None, "rope.scaling.factor": None,
}  # fmt: skip
"""Keys of all; there is no limit to the context, and heads are not counted."""


_VECTOR = Conversion(lambda array, settings: array.reshape(-1), lambda shape, settings: (math.prod(shape),))


def _fused(n_mix: Callable[[Settings], int]) -> Conversion:
    """Weights of this many mixes; ValueError where one is missing."""

    def shape(shape: Shape, settings: Settings) -> Shape:
        if shape[0] != n_mix(settings):
            raise ValueError(f"shape {shape}, expected {n_mix(settings)} mixes")
        return shape[0], 1, 1, shape[-1]

    return Conversion(lambda array, settings: array.reshape(shape(array.shape, settings)), shape)


_FIVE = _fused(lambda settings: 5)


def _rescaled(array: Any, settings: Settings) -> Any:
    """Outputs of layers, halved at every so many."""
    block, step = settings["block"], settings.get("rescale_every") or 0
    return array / array.dtype.type(2 ** (block // step)) if step > 0 else array


def _reordered(array: Any, settings: Settings) -> Any:
    """Projections of five mixes, QRWKV-6's in the order of RWKV-6."""
    rows = array.swapaxes(-1, -2)
    return rows.reshape(5, -1, rows.shape[-1])[[3, 1, 2, 0, 4]].reshape(rows.shape)


def _large(name: str, large: int, other: int, *, above: bool) -> Callable[[Settings], int]:
    """Rank by config.json, or of models of 4096 numbers and others."""

    def rank(settings: Settings) -> int:
        n = settings["hidden_size"]
        return int(settings.get(name, large if n == 4096 or (above and n > 4096) else other))

    return rank


def _rank(names: tuple[str, str], exponent: float, factor: float) -> Callable[[Settings], int]:
    """Rank of a projection; null is one by the model's width."""

    def rank(settings: Settings) -> int:
        name = next((name for name in names if name in settings), names[0])
        if settings[name] is not None:
            return int(settings[name])
        return max(1, round(settings["hidden_size"] ** exponent * factor / 32)) * 32

    return rank


def _by_rows(settings: Settings) -> bool:
    """True where projections of low rank have a row for each output."""
    return any("_lora.lora" in name for name in settings["tensor_names"])


_LOW_RANK = Conversion(
    lambda array, settings: array if _by_rows(settings) else TRANSPOSED.apply(array, settings),
    lambda shape, settings: shape if _by_rows(settings) else TRANSPOSED.shape(shape, settings),
)
_MIXES = tuple(
    (rf"attention\.time_maa_{name}$", f"attention.mix_projections.{i}.weight") for i, name in enumerate("wkvrg")
)
_WEIGHTS = (r"(\.time_\w+)$", r"\1.weight")
_SEVEN = (
    (r"blocks", "layers"), (r"ffn", "feed_forward"), (r"self_attn|attn", "attention"), (r"time_mixer\.", ""),
    (r"feed_forward_norm", "ln2"), (r"g_norm", "ln_x"),
    (r"_lora\.lora\.0\.weight$", "1.weight"), (r"_lora\.lora\.2\.weight$", "2.weight"),
    (r"_lora\.lora\.2\.bias$", "0.weight"), (r"attention\.x_x$", "attention.mix_projections.weight"),
    *((rf"attention\.x_{name}$", f"attention.mix_projections.{i}.weight") for i, name in enumerate("rwkvag")),
    (r"(\.[wavg][012]|\.x_k|\.[kr]_[ka])$", r"\1.weight"),
)  # fmt: skip
"""One name for tensors that have several, and numbers for mixes."""

_LAYER_SEVEN: dict[str, Any] = {
    "rename": _SEVEN, "drop": (r"(layers|blocks)\.0\.\w+\.(time_mixer\.)?v([012](\.weight)?$|_lora)",),
    "whole": {r"(layers\.0\.attention)\.a([012]\.weight)$": (r"\1.a\2", r"\1.v\2")},
    "tensors": {"model.layers.{}.attention.mix_projections": "blk.{}.time_mix_lerp_fused"},
    "convert": {
        **{f"time_mix_{name}{i}.weight": _LOW_RANK for name in "wavg" for i in (1, 2)},
        **dict.fromkeys((f"time_mix_{name}.weight" for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")), _VECTOR),
        "time_mix_lerp_fused.weight": _fused(lambda settings: 6 if settings.get("wkv_has_gate", True) else 5),
        "channel_mix_lerp_k.weight": _VECTOR,
    },
}  # fmt: skip
"""First values have no mix with themselves; loaders ask for it, and get another's."""


def _version(settings: Settings) -> int:
    """Rank of decays; ValueError for another version of the time mix."""
    if settings["wkv_version"] != 7:
        raise ValueError(f"wkv_version is {settings['wkv_version']!r}, expected 7")
    return 64


CHECKPOINTS = (
    Checkpoint(
        "rwkv6", ("Rwkv6ForCausalLM",),
        _COMMON | {
            "attention.layer_norm_epsilon": field("layer_norm_epsilon", kind=float),
            "rescale_every_n_layers": field("rescale_every"), "wkv.head_size": field("head_size"),
            "time_mix_extra_dim": _large("", 64, 32, above=False),
            "time_decay_extra_dim": _large("", 128, 64, above=False),
            "feed_forward_length": lambda settings: (
                settings["intermediate_size"] or int(settings["hidden_size"] * 3.5 // 32 * 32)
            ),
        },
        vocabulary=("own",), tokenizer=world, rename=(*_MIXES, _WEIGHTS),
        tensors={"rwkv.blocks.{}.attention.mix_projections": "blk.{}.time_mix_lerp_fused"},
        convert={
            **{f"time_mix_{name}.weight": TRANSPOSED for name in ("w1", "w2", "decay_w1", "decay_w2")},
            **dict.fromkeys(("time_mix_decay.weight", "time_mix_lerp_x.weight", "channel_mix_lerp_k.weight",
                             "channel_mix_lerp_r.weight"), _VECTOR),
            **dict.fromkeys(("time_mix_output.weight", "channel_mix_value.weight"),
                            Conversion(_rescaled, computes=True)),
            "time_mix_lerp_fused.weight": _FIVE,
        },
    ),
    Checkpoint(
        "rwkv6qwen2", ("RWKV6Qwen2ForCausalLM",),
        _COMMON | {
            "attention.layer_norm_rms_epsilon": field("rms_norm_eps", kind=float), "token_shift_count": 1,
            "attention.head_count_kv": field("num_key_value_heads"),
            "wkv.head_size": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
            "time_mix_extra_dim": _large("lora_rank_tokenshift", 64, 32, above=True),
            "time_decay_extra_dim": _large("lora_rank_decay", 128, 64, above=True),
        },
        vocabulary=("sentencepiece", "bpe"), pre=("qwen2",),
        rename=(*((pattern.replace("attention", "self_attn"), new.replace("attention", "self_attn"))
                  for pattern, new in _MIXES), _WEIGHTS),
        tensors={"model.layers.{}.self_attn.mix_projections": "blk.{}.time_mix_lerp_fused"},
        convert={
            **dict.fromkeys(("time_mix_w1.weight", "time_mix_w2.weight"), Conversion(_reordered, TRANSPOSED.shape)),
            **dict.fromkeys(("time_mix_decay_w1.weight", "time_mix_decay_w2.weight"), TRANSPOSED),
            **dict.fromkeys(("time_mix_decay.weight", "time_mix_lerp_x.weight"), _VECTOR),
            "time_mix_lerp_fused.weight": _FIVE,
        },
    ),
    Checkpoint(
        "rwkv7", ("Rwkv7ForCausalLM", "RWKV7ForCausalLM"),
        _COMMON | {
            "attention.layer_norm_epsilon": field("layer_norm_epsilon", "norm_eps", kind=float),
            "wkv.head_size": field("head_size", "head_dim"),
            "attention.decay_lora_rank": _rank(("lora_rank_decay", "decay_low_rank_dim"), 0.5, 1.8),
            "attention.iclr_lora_rank": _rank(("lora_rank_iclr", "a_low_rank_dim"), 0.5, 1.8),
            "attention.value_residual_mix_lora_rank": _rank(
                ("lora_rank_value_residual_mix", "v_low_rank_dim"), 0.5, 1.3
            ),
            "attention.gate_lora_rank": _rank(("lora_rank_gate", "gate_low_rank_dim"), 0.8, 0.6),
            "feed_forward_length": lambda settings: settings["intermediate_size"] or settings["hidden_size"] * 4,
        },
        vocabulary=("own",), tokenizer=world, **_LAYER_SEVEN,
    ),
    Checkpoint(
        "arwkv7", ("RwkvHybridForCausalLM",),
        _COMMON | {
            "attention.layer_norm_rms_epsilon": field("rms_norm_eps", kind=float), "token_shift_count": 1,
            "wkv.head_size": field("head_size"), "attention.decay_lora_rank": _version,
            "attention.iclr_lora_rank": 64, "attention.value_residual_mix_lora_rank": 32,
            "attention.gate_lora_rank": lambda settings: 128 if settings["wkv_has_gate"] else 0,
        },
        vocabulary=("sentencepiece", "bpe"), pre=("qwen2",), **_LAYER_SEVEN,
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

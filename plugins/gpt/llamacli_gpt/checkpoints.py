"""Hugging Face checkpoints of GPT-2, GPT-NeoX, BLOOM, Falcon, StarCoder, Jais and kin."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import TRANSPOSED, Checkpoint, Conversion, Settings, field, head_dim, hookimpl, rope_of
from llamacli_gpt.checkpoints_speech import POCKET_TTS

LLAMACLI_API = 1


def _head_dim(settings: Settings) -> int:
    n_head = settings.get("num_attention_heads") or settings["n_head"]
    return int(settings["hidden_size"] // n_head)


def _rope_dims(settings: Settings) -> int:
    """Rotated numbers of a head."""
    share = rope_of(settings).get("partial_rotary_factor") or settings.get("rotary_pct", 0.25)
    return int(share * _head_dim(settings))


def _kv_heads(settings: Settings) -> int:
    """Heads of keys and values of Falcon, one in its first models."""
    if settings.get("multi_query", True) and not settings.get("new_decoder_architecture"):
        return 1
    return int(settings.get("num_kv_heads") or settings.get("n_head_kv") or 1)


def _networks(name: str) -> Callable[[Settings], int]:
    return lambda settings: 4 * int(settings[name])


def _of_heads(array: Any, settings: Settings) -> Any:
    """Queries, then keys and values, of rows that are sorted by heads."""
    head = _head_dim(settings)
    parts = array.reshape(-1, 3, head, *array.shape[1:])
    return parts.swapaxes(0, 1).reshape(array.shape)


def _of_groups(array: Any, settings: Settings) -> Any:
    """As `_of_heads`, where several queries precede a key and a value."""
    head = _head_dim(settings)
    groups = array.reshape(_kv_heads(settings), -1, head, *array.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def _parallel(settings: Settings) -> bool:
    return bool(settings.get("use_parallel_residual", True))


def _attention(name: str, kind: type = float) -> Callable[[Settings], Any]:
    return lambda settings: None if (x := settings["attn_config"].get(name)) is None else kind(x)


def _alibi(settings: Settings) -> float:
    config = settings["attn_config"]
    return float(config["alibi_bias_max"]) if config["alibi"] else 0.0


def _joined_shape(shape: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
    if shape[0] != 3:
        raise ValueError(f"{shape[0]} of three projections")
    return 3 * shape[1], *shape[2:]


def _embedding_scale(array: Any, settings: Settings) -> Any:
    scale = settings.get("mup_embeddings_scale", settings.get("embeddings_scale"))
    return array * array.dtype.type(scale)


def _output_scale(array: Any, settings: Settings) -> Any:
    """Output of Jais, whose scale is one number or two."""
    pair = settings.get("mup_output_alpha"), settings.get("mup_width_scale")
    return array * array.dtype.type(settings["width_scale"] if pair[0] is None else pair[0] * pair[1])


_WITHOUT_ROPE = {"rope.freq_base": None}
_EMBEDDING = {"embedding_length": field("hidden_size", "n_embed"), "feed_forward_length": _networks("hidden_size")}
_QKV = {f"attn_qkv.{kind}": Conversion(_of_heads) for kind in ("weight", "bias")}
_JOINED = Conversion(lambda array, settings: array.reshape(-1, *array.shape[2:]), _joined_shape)
"""Queries, keys and values, below each other."""
_COLUMNS = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
_PRE = ("gpt-2", "olmo")

CHECKPOINTS = (
    Checkpoint(
        "gpt2", ("GPT2LMHeadModel",), {"feed_forward_length": _networks("n_embd")},
        {"n_ctx": lambda settings: settings["n_positions"], "layer_norm_epsilon": 1e-5},
        pre=_PRE, rename=((r"^(?!transformer\.|lm_head)", "transformer."),),
        drop=(r"\.attn\.(masked_)?bias$",), convert=dict.fromkeys(_COLUMNS, TRANSPOSED),
    ),
    Checkpoint(
        "gpt2", ("RuGPT3XLForCausalLM",), pre=_PRE,
        rename=tuple((rf"\.self_attn\.{name}_proj\.", f".self_attn.qkv_projections.{i}.")
                     for i, name in enumerate("qkv")),
        tensors={"model.embed_positions": "position_embd",
                 "model.layers.{}.self_attn.qkv_projections": "blk.{}.attn_qkv"},
        convert={f"attn_qkv.{kind}": _JOINED for kind in ("weight", "bias")},
    ),
    Checkpoint(
        "gptneox", ("GPTNeoXForCausalLM",),
        {"rope.dimension_count": _rope_dims, "use_parallel_residual": _parallel, "attention.head_count_kv": None,
         "attention.layer_norm_rms_epsilon": None, **_WITHOUT_ROPE},
        {"layer_norm_eps": 1e-5}, pre=("olmo", "gpt-2"), convert=_QKV,
    ),
    Checkpoint(
        "bloom", ("BloomForCausalLM", "BloomModel"),
        {"context_length": field("seq_length", "hidden_size"), **_EMBEDDING,
         "attention.head_count_kv": field("num_attention_heads", "n_head"), **_WITHOUT_ROPE},
        {"layer_norm_epsilon": 1e-5}, pre=("bloom", "gpt-2"),
        rename=((r"^transformer\.", ""),), convert=_QKV,
    ),
    Checkpoint(
        "falcon", ("FalconForCausalLM", "RWForCausalLM"),
        {"context_length": 2048, "tensor_data_layout": "jploski", **_EMBEDDING,
         "attention.head_count_kv": _kv_heads, **_WITHOUT_ROPE},
        {"layer_norm_epsilon": 1e-5},
        pre=("falcon", "gpt-2"), convert={f"attn_qkv.{kind}": Conversion(_of_groups) for kind in ("weight", "bias")},
    ),
    Checkpoint(
        "starcoder", ("GPTBigCodeForCausalLM",),
        {"context_length": field("n_positions"), "feed_forward_length": _networks("n_embd"),
         "attention.head_count_kv": 1},
        {"layer_norm_epsilon": 1e-5}, pre=("starcoder", "refact", "gpt-2"),
    ),
    Checkpoint(
        "codeshell", ("CodeShellForCausalLM",),
        {"context_length": field("n_positions"), "feed_forward_length": _networks("n_embd"),
         "attention.head_count_kv": field("num_query_groups"), "rope.freq_base": 10000.0,
         "rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"layer_norm_epsilon": 1e-5, "num_query_groups": 8}, pre=("codeshell", "gpt-2"),
    ),
    Checkpoint(
        "jais", ("JAISLMHeadModel",),
        {"context_length": field("n_positions"), "attention.head_count_kv": None, "attention.max_alibi_bias": 8.0},
        {"layer_norm_epsilon": 1e-5}, pre=("jais", "gpt-2"), drop=(r"\.attn\.bias$", r"relative_pe\.slopes$"),
        convert=dict.fromkeys((*_COLUMNS, "ffn_gate.weight"), TRANSPOSED) | {
            "token_embd.weight": Conversion(_embedding_scale, computes=True),
            "output.weight": Conversion(_output_scale, computes=True),
        },
    ),
    Checkpoint(
        "jais2", ("Jais2ForCausalLM",), {"rope.dimension_count": head_dim},
        {"layer_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
         "num_key_value_heads": lambda settings: settings["num_attention_heads"], "head_dim": head_dim},
        pre=("jais-2",),
    ),
    Checkpoint(
        "starcoder2", ("Starcoder2ForCausalLM",), {}, {"norm_epsilon": 1e-5, "rope_theta": 10000.0},
        pre=("starcoder", "refact", "gpt-2"),
    ),
    POCKET_TTS,
    Checkpoint(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM", "LlavaStableLMEpochForCausalLM"),
        {"rope.dimension_count": _rope_dims, "use_parallel_residual": _parallel,
         "attention.layer_norm_rms_epsilon": None,
         "attention.layer_norm_epsilon": field("layer_norm_eps", "norm_eps", kind=float), **_WITHOUT_ROPE},
        {"layer_norm_eps": 1e-5}, pre=("stablelm2", "gpt-2"),
        rename=((r"layernorm\.norms\.", "layernorm."),),
    ),
    Checkpoint(
        "mpt", ("MPTForCausalLM", "MptForCausalLM"),
        {"context_length": field("max_seq_len"), "embedding_length": field("d_model"),
         "feed_forward_length": _networks("d_model"), "attention.head_count_kv": _attention("kv_n_heads", int),
         "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": _attention("clip_qkv"),
         "attention.max_alibi_bias": _alibi},
        pre=("mpt", "gpt-2"),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of Mamba, Mamba-2, Falcon-H1 and Jamba."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import (
    MINUS_EXP,
    SQUEEZED,
    Checkpoint,
    Conversion,
    Settings,
    field,
    head_dim,
    hookimpl,
    state_space,
)

LLAMACLI_API = 1


def _inner(settings: Settings) -> int:
    return int(settings.get("intermediate_size") or settings.get("expand", 2) * settings["hidden_size"])


def _groups(settings: Settings) -> int:
    return int(settings.get("n_groups") or 1)


def _scaled(*factors: Callable[[Settings], float]) -> Conversion:
    def apply(array: Any, settings: Settings) -> Any:
        for factor in factors:
            array = array * array.dtype.type(factor(settings))
        return array

    return Conversion(apply, computes=True)


def _number(name: str, at: int | None = None) -> Callable[[Settings], float]:
    """Factor of config.json, or one of a list there; 1 without it."""
    return lambda settings: settings.get(name, 1.0) if at is None else settings[name][at]


def _parts_scaled(array: Any, settings: Settings) -> Any:
    """Factors of rows: gates, inputs, B, C and time steps."""
    n_inner, n_state = settings["mamba_d_ssm"], settings["mamba_n_groups"] * settings["mamba_d_state"]
    sizes = (n_inner, n_inner, n_state, n_state, len(array) - 2 * n_inner - 2 * n_state)
    factors = np.repeat(np.array(settings["ssm_multipliers"], array.dtype), sizes)
    return array * array.dtype.type(settings["ssm_in_multiplier"]) * factors[:, None]


def _falcon_groups(settings: Settings) -> int:
    return int(settings["mamba_n_groups"])


_ATTENTION_IN, _ATTENTION_OUT = _number("attention_in_multiplier"), _number("attention_out_multiplier")
_FALCON: dict[str, Conversion] = {
    **state_space(_falcon_groups),
    "ffn_gate.weight": _scaled(_number("mlp_multipliers", 0)),
    "ffn_down.weight": _scaled(_number("mlp_multipliers", 1)),
    "attn_q.weight": _scaled(_ATTENTION_IN), "attn_k.weight": _scaled(_number("key_multiplier"), _ATTENTION_IN),
    "attn_v.weight": _scaled(_ATTENTION_IN), "attn_output.weight": _scaled(_ATTENTION_OUT),
    "ssm_out.weight": _scaled(_number("ssm_out_multiplier")), "ssm_in.weight": Conversion(_parts_scaled, computes=True),
    "output.weight": _scaled(_number("lm_head_multiplier")),
    "token_embd.weight": _scaled(_number("embedding_multiplier")),
}  # fmt: skip


def _kv_heads(settings: Settings) -> list[int]:
    """Heads of keys and values by layer, none in state spaces."""
    first, period = settings["attn_layer_offset"], settings["attn_layer_period"]
    layers = range(settings["num_hidden_layers"])
    return [settings["num_key_value_heads"] if i >= first and (i - first) % period == 0 else 0 for i in layers]


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {} if kind == "sentencepiece" else {"tokenizer.ggml.add_space_prefix": False}


_KEYS: dict[str, Any] = {
    "context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None,
    "attention.layer_norm_epsilon": None,
    "attention.layer_norm_rms_epsilon": field("layer_norm_epsilon", "rms_norm_eps", kind=float),
    "attention.key_length": None, "attention.value_length": None, "rope.freq_base": None,
    "ssm.conv_kernel": field("conv_kernel", "d_conv"), "ssm.inner_size": _inner,
    "ssm.state_size": field("state_size", "d_state"),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {"conv_kernel": 4, "layer_norm_epsilon": 1e-5}
_TIED = (r"^lm_head\.",)

CHECKPOINTS = (
    Checkpoint(
        "mamba", ("MambaForCausalLM", "MambaLMHeadModel", "FalconMambaForCausalLM"),
        _KEYS | {
            "ssm.time_step_rank": lambda fields: int(fields.get("time_step_rank") or -(-fields["hidden_size"] // 16)),
            "ssm.dt_b_c_rms": lambda settings: settings.get("model_type") == "falcon_mamba",
        },
        _DEFAULTS | {"state_size": 16, "pad_vocab_size_multiple": 8, "hidden_size": field("d_model")},
        pre=("olmo", "gpt-2"),
        drop=lambda settings: _TIED if settings.get("tie_word_embeddings", True) else (),
        convert={"ssm_a": MINUS_EXP, "ssm_conv1d.weight": SQUEEZED},
    ),
    Checkpoint(
        "mamba2", ("Mamba2ForCausalLM",),
        _KEYS | {
            "ssm.time_step_rank": lambda settings: _inner(settings) // settings["head_dim"],
            "ssm.group_count": _groups,
        },
        _DEFAULTS | {"state_size": 128, "head_dim": 64, "pad_vocab_size_multiple": 16}, ("sentencepiece", "bpe"),
        pre=("olmo", "gpt-2"),
        rename=((r"^model\.(backbone|lm_head)", r"\1"), (r"\.dt_bias$", ".dt_proj.bias")),
        convert=state_space(_groups),
    ),
    Checkpoint(
        "falcon-h1", ("FalconH1ForCausalLM",),
        {
            "vocab_size": field("vocab_size"), "ssm.conv_kernel": field("mamba_d_conv"),
            "ssm.inner_size": field("mamba_d_ssm"), "ssm.state_size": field("mamba_d_state"),
            "ssm.time_step_rank": lambda settings: settings["mamba_d_ssm"] // settings["mamba_d_head"],
            "ssm.group_count": _falcon_groups,
        },
        {"head_dim": head_dim, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0,
         "mamba_d_conv": 4, "mamba_d_ssm": lambda fields: fields.get("mamba_expand", 2) * fields["hidden_size"],
         "ssm_in_multiplier": 1.0, "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0]},
        pre=("falcon-h1", "falcon3", "llama-bpe"), rename=((r"\.dt_bias$", ".dt_proj.bias"),), convert=_FALCON,
    ),
    Checkpoint(
        "jamba", ("JambaForCausalLM",),
        {
            "attention.head_count_kv": _kv_heads, "rope.freq_base": None, "ssm.conv_kernel": field("mamba_d_conv"),
            "ssm.inner_size": lambda settings: settings["mamba_expand"] * settings["hidden_size"],
            "ssm.state_size": field("mamba_d_state"), "ssm.time_step_rank": field("mamba_dt_rank"),
            "attention.key_length": None, "attention.value_length": None,
        },
        {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "rms_norm_eps": 1e-6,
         "mamba_dt_rank": lambda settings: -(-settings["hidden_size"] // 16), "num_experts": 16,
         "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4, "num_key_value_heads": 8},
        ("sentencepiece", "byte_fallback"), tokenizer=_space_prefix,
        rename=((r"\.feed_forward\.experts\.", ".mlp.experts."),),
        convert={"ssm_a": MINUS_EXP, "ssm_conv1d.weight": SQUEEZED},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

"""Hugging Face checkpoints of PLaMo 2 and 3."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import MINUS_EXP, PLUS_ONE, SQUEEZED, Checkpoint, Conversion, Settings, field, hookimpl, rope_of

LLAMACLI_API = 1


def _more(value: float) -> Conversion:
    """Weights of norms that lack this value."""
    return Conversion(lambda array, settings: array + np.float32(value), computes=True)


_NORMS = {
    "attn_norm.weight": PLUS_ONE, "post_attention_norm": _more(1 / 5), "ffn_norm.weight": PLUS_ONE,
    "post_ffw_norm": _more(1 / 5**1.5), "output_norm.weight": PLUS_ONE,
}  # fmt: skip


def _attends(settings: Settings) -> list[bool]:
    """Layers with attention; the others have Mamba."""
    n, step = settings["num_hidden_layers"], settings["mamba_step"]
    if not settings["mamba_enabled"]:
        raise ValueError("mamba_enabled is false: such folders have no numbers of heads by layer")
    return [i == n - 1 if n <= step // 2 else i % step == step // 2 for i in range(n)]


def _by_layer(name: str) -> Callable[[Settings], list[int]]:
    return lambda settings: [settings[name] if attends else 0 for attends in _attends(settings)]


def _yarn(settings: Settings) -> dict[str, Any] | None:
    """RoPE parameters of fields that have no object of their own."""
    if settings.get("rope_scaling") or (factor := settings.get("rope_scaling_factor", 1)) == 1:
        return None
    return {"rope_type": "yarn", "factor": float(factor), "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": int(settings["initial_context_length"])}  # fmt: skip


def _begins_turns(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Id of `<|plamo:op|>`, which begins a turn, as the end of one."""
    return {"tokenizer.ggml.eot_token_id": 4}


def _without_template(*given: Any) -> dict[str, Any]:
    return _begins_turns(*given) | {"tokenizer.chat_template": None}


CHECKPOINTS = (
    Checkpoint(
        "plamo2", ("Plamo2ForCausalLM", "PLaMo2ForCausalLM"),
        {
            "vocab_size": field("vocab_size"), "attention.head_count": _by_layer("num_attention_heads"),
            "attention.head_count_kv": _by_layer("num_key_value_heads"),
            "attention.key_length": field("hidden_size_per_head"),
            "attention.value_length": field("hidden_size_per_head"),
            "rope.freq_base": lambda settings: float(rope_of(settings).get("rope_theta", 10000)),
            "ssm.state_size": field("mamba_d_state"), "ssm.conv_kernel": field("mamba_d_conv"),
            "ssm.time_step_rank": field("mamba_num_heads"), "ssm.group_count": 0,
            "ssm.inner_size": lambda settings: settings["mamba_num_heads"] * settings["hidden_size_per_head"],
        },
        {"mamba_step": 2, "mamba_enabled": True, "num_key_value_heads": 4, "num_attention_heads": 32,
         "max_position_embeddings": 2048, "hidden_size": 4096, "hidden_size_per_head": 128, "rms_norm_eps": 1e-6,
         "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": 64, "intermediate_size": 13312},
        vocabulary=("scored",), tokenizer=_without_template,
        rename=((r"\.dt_bias$", ".dt_proj.bias"), (r"\.(dt_norm|B_norm|C_norm|k|q)_weight$", r".\1.weight")),
        convert=_NORMS | {"ssm_a": MINUS_EXP, "ssm_conv1d.weight": SQUEEZED},
    ),
    Checkpoint(
        "plamo3", ("Plamo3ForCausalLM", "PLaMo3ForCausalLM"),
        {
            "vocab_size": field("vocab_size"), "attention.sliding_window": field("window_size", "sliding_window"),
            "attention.sliding_window_pattern": field("sliding_window_pattern"),
        },
        {"rope_scaling": _yarn}, vocabulary=("scored",), tokenizer=_begins_turns,
        convert=_NORMS | {"attn_q_norm.weight": PLUS_ONE, "attn_k_norm.weight": PLUS_ONE},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

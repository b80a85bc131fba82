"""Hugging Face checkpoints of Mamba and Mamba-2."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import MINUS_EXP, SQUEEZED, Checkpoint, Conversion, Settings, field, hookimpl

LLAMACLI_API = 1


def _inner(settings: Settings) -> int:
    return int(settings.get("intermediate_size") or settings.get("expand", 2) * settings["hidden_size"])


def _groups(settings: Settings) -> int:
    return int(settings.get("n_groups") or 1)


def _padded(n: int) -> Callable[[Settings], int]:
    """Size of the vocabulary as files have it, a multiple."""
    return lambda settings: -(-settings["vocab_size"] // n) * n


_COLUMN = Conversion(lambda array, settings: array[:, None], lambda shape, settings: (*shape, 1))
_DECAY = Conversion(
    lambda array, settings: MINUS_EXP.apply(array, settings)[:, None],
    lambda shape, settings: (*shape, 1),
    computes=True,
)
_NORM = Conversion(
    lambda array, settings: array.reshape(_groups(settings), -1),
    lambda shape, settings: (_groups(settings), shape[0] // _groups(settings)),
)
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
        "mamba", ("MambaForCausalLM",),
        _KEYS | {
            "ssm.time_step_rank": lambda fields: int(fields.get("time_step_rank") or -(-fields["hidden_size"] // 16)),
            "ssm.dt_b_c_rms": False,
        },
        _DEFAULTS | {"state_size": 16}, pre=("olmo", "gpt-2"),
        drop=lambda settings: _TIED if settings.get("tie_word_embeddings", True) else (),
        convert={"ssm_a": MINUS_EXP, "ssm_conv1d.weight": SQUEEZED},
    ),
    Checkpoint(
        "mamba2", ("Mamba2ForCausalLM",),
        _KEYS | {
            "ssm.time_step_rank": lambda settings: _inner(settings) // settings["head_dim"],
            "ssm.group_count": _groups,
        },
        _DEFAULTS | {"state_size": 128, "head_dim": 64}, ("sentencepiece", "bpe"), pre=("olmo", "gpt-2"),
        rename=((r"^model\.(backbone|lm_head)", r"\1"), (r"\.dt_bias$", ".dt_proj.bias")),
        convert={"ssm_a": _DECAY, "ssm_d": _COLUMN, "ssm_norm.weight": _NORM, "ssm_conv1d.weight": SQUEEZED},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)

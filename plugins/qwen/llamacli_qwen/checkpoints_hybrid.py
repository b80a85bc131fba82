"""Hugging Face checkpoints of Qwen3-Next and Qwen3.5, of gated delta nets."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from llamacli.plugin import MINUS_EXP, PLUS_ONE, SQUEEZED, Checkpoint, Conversion, Settings, field, head_dim, rope_of

Shape = tuple[int, ...]


def _n_predicting(settings: Settings) -> int:
    """Blocks for multi-token prediction that the folder has."""
    return len({name.split(".")[2] for name in settings["tensor_names"] if name.startswith("mtp.layers.")})


def _recurrent(settings: Settings) -> list[bool]:
    return [kind == "linear_attention" for kind in settings["layer_types"]] + [False] * _n_predicting(settings)


def _layer_types(settings: Settings) -> list[str]:
    interval = settings.get("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return [kinds[(i + 1) % interval == 0] for i in range(settings["num_hidden_layers"])]


_HEAD = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
"""Tensors of the head for multi-token prediction, by their names behind `mtp`."""


def _names(settings: Settings) -> tuple[tuple[str, str], ...]:
    last = settings["num_hidden_layers"]
    block = f"model.layers.{last}."
    return (
        (r"\.dt_bias$", ".dt_proj.bias"),
        *((rf"^mtp\.layers\.{i}\.", f"model.layers.{last + i}.") for i in range(_n_predicting(settings))),
        *((rf"^mtp\.{name}\.", f"{block}{name}.") for name in _HEAD),
        (r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),
    )


def _widths(settings: Settings) -> tuple[int, int, int, int]:
    """Heads of keys, values of each, widths of both."""
    n_k, n_v = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    return n_k, n_v // n_k, settings["linear_key_head_dim"], settings["linear_value_head_dim"]


def _inner(settings: Settings) -> int:
    return int(settings["linear_value_head_dim"] * settings["linear_num_value_heads"])


# --- Qwen3-Next: rows of queries, keys, values and gates alternate by heads of keys ---


def _rows(first: int, last: int) -> Conversion:
    """Parts of the four that each head has in `in_proj_qkvz`."""

    def sizes(settings: Settings) -> list[int]:
        _, repeats, n_key, n_value = _widths(settings)
        return [n_key, n_key, repeats * n_value, repeats * n_value]

    def apply(array: Any, settings: Settings) -> Any:
        heads = array.reshape(settings["linear_num_key_heads"], -1, array.shape[-1])
        parts = np.split(heads, np.cumsum(sizes(settings))[:-1], axis=1)
        return np.concatenate([part.reshape(-1, array.shape[-1]) for part in parts[first:last]])

    def shape(shape: Shape, settings: Settings) -> Shape:
        n_head, each = settings["linear_num_key_heads"], sizes(settings)
        if shape[0] != n_head * sum(each):
            raise ValueError(f"shape {shape}, expected {n_head} heads of {sum(each)} rows")
        return n_head * sum(each[first:last]), shape[1]

    return Conversion(apply, shape)


# --- Qwen3.5: heads of values are tiled over those of keys, where they were repeated ---


def _tiled(array: Any, settings: Settings, width: int) -> Any:
    n_k, repeats, _, _ = _widths(settings)
    return array.reshape(n_k, repeats, width, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _values(settings: Settings) -> int:
    return int(settings["linear_value_head_dim"])


def _behind_keys(array: Any, settings: Settings) -> Any:
    n_k, _, n_key, n_value = _widths(settings)
    return np.concatenate([array[: 2 * n_k * n_key], _tiled(array[2 * n_k * n_key :], settings, n_value)])


def _columns(array: Any, settings: Settings) -> Any:
    return np.ascontiguousarray(_tiled(array.T, settings, _values(settings)).T)


_SINGLE = Conversion(lambda array, settings: _tiled(array, settings, 1))
_TILED: dict[str, Conversion] = {
    "attn_qkv.weight": Conversion(_behind_keys),
    "attn_gate.weight": Conversion(lambda array, settings: _tiled(array, settings, _values(settings))),
    "ssm_alpha.weight": _SINGLE, "ssm_beta.weight": _SINGLE, "ssm_dt.bias": _SINGLE,
    "ssm_a": Conversion(lambda array, settings: _tiled(MINUS_EXP.apply(array, settings), settings, 1), computes=True),
    "ssm_conv1d.weight": Conversion(
        lambda array, settings: _behind_keys(SQUEEZED.apply(array, settings), settings), SQUEEZED.shape
    ),
    "ssm_out.weight": Conversion(_columns, columns=True),
}  # fmt: skip
_NORMS = (
    "attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm", "nextn.enorm", "nextn.hnorm",
    "nextn.shared_head_norm",
)  # fmt: skip
_ONE = {f"{name}.weight": PLUS_ONE for name in _NORMS}
_KEYS: dict[str, Any] = {
    "block_count": lambda settings: settings["num_hidden_layers"] + _n_predicting(settings),
    "nextn_predict_layers": lambda settings: _n_predicting(settings) or None,
    "ssm.conv_kernel": field("linear_conv_kernel_dim"), "ssm.state_size": field("linear_key_head_dim"),
    "ssm.group_count": field("linear_num_key_heads"), "ssm.time_step_rank": field("linear_num_value_heads"),
    "ssm.inner_size": _inner, "attention.recurrent_layers": _recurrent,
    "full_attention_interval": lambda settings: settings.get("full_attention_interval", 4),
    "rope.dimension_count": lambda settings: int(
        head_dim(settings) * rope_of(settings).get("partial_rotary_factor", 0.25)
    ),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "layer_types": _layer_types,
}  # fmt: skip


def _sections(settings: Settings) -> list[int]:
    return [*settings["rope_parameters"].get("mrope_section", (11, 11, 10)), 0, 0, 0, 0][:4]


def checkpoints(experts: Mapping[str, Any], stacked: Mapping[str, Any], pre: tuple[str, ...]) -> tuple[Checkpoint, ...]:
    """Layouts, with keys and names of experts."""
    split: dict[str, Any] = {"split": stacked["split"]}
    head = {f"model.layers.{{}}.{name}": f"blk.{{}}.nextn.{target}" for name, target in _HEAD.items()}
    later: dict[str, Any] = {"tensors": head, "rename": _names, "convert": _ONE | _TILED, "pre": ("qwen35", *pre)}
    return (
        Checkpoint(
            "qwen3next", ("Qwen3NextForCausalLM",), dict(experts) | _KEYS, _DEFAULTS, pre=pre, rename=_names, **split,
            tensors=head, whole={r"\.in_proj_qkvz\.": (".in_proj_qkv.", ".in_proj_z.")},
            convert=_ONE | {
                "attn_qkv.weight": _rows(0, 3), "attn_gate.weight": _rows(3, 4), "ssm_a": MINUS_EXP,
                "ssm_conv1d.weight": SQUEEZED,
            },
        ),
        Checkpoint(
            "qwen35",
            ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "MiniCPMV4_6ForConditionalGeneration"),
            _KEYS | {"rope.dimension_sections": _sections}, _DEFAULTS, **later, drop=(r"^model\.merger\.",),
        ),
        Checkpoint(
            "qwen35moe", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
            dict(experts) | _KEYS | {"rope.dimension_sections": _sections}, _DEFAULTS, **later, **split,
        ),
    )  # fmt: skip

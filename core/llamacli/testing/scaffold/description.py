"""Descriptions of models: keys and tensor shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from llamacli.loaders import ModelFile
from llamacli.testing.tiny import KEYS

Shape = tuple[int, ...]


@attrs.frozen
class Description:
    """Keys, without the architecture's name, and tensor shapes of a file.

    `rotates_halves` is true where RoPE is known to rotate halves of heads.
    """

    architecture: str
    keys: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    rotates_halves: bool = False

    @classmethod
    def of(cls, file: ModelFile) -> Description:
        """Describe an open file."""
        architecture = file.metadata.get_str("general.architecture")
        prefix = f"{architecture}."
        keys = {key.removeprefix(prefix): file.metadata[key] for key in file.metadata if key.startswith(prefix)}
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in keys.items()}
        return cls(architecture, plain, {name: tuple(info.shape) for name, info in file.tensors.items()})

    @property
    def n_layer(self) -> int:
        """Number of blocks that have tensors."""
        return 1 + max(
            (int(found[1]) for name in self.shapes if (found := re.match(r"blk\.(\d+)\.", name))), default=-1
        )

    def layers(self, name: str) -> frozenset[int]:
        """Blocks that have a tensor of this name."""
        return frozenset(i for i in range(self.n_layer) if f"blk.{i}.{name}" in self.shapes)

    def names(self, layer: int) -> frozenset[str]:
        """Names of the tensors of a block, without its prefix."""
        prefix = f"blk.{layer}."
        return frozenset(name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix))


_DECODER = {key: value for key, value in KEYS.items() if key != "attention.layer_norm_epsilon"}
_ATTENTION: dict[str, Shape] = {
    "attn_norm.weight": (64,), "attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_v.weight": (32, 64),
    "attn_output.weight": (64, 64),
}  # fmt: skip
_NETWORK: dict[str, Shape] = {
    "ffn_norm.weight": (64,), "ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96),
}  # fmt: skip
_EXPERTS: dict[str, Shape] = {
    "ffn_norm.weight": (64,), "ffn_gate_inp.weight": (8, 64), "ffn_gate_exps.weight": (8, 32, 64),
    "ffn_up_exps.weight": (8, 32, 64), "ffn_down_exps.weight": (8, 64, 32),
}  # fmt: skip
_RECURRENCE: dict[str, Shape] = {
    "attn_norm.weight": (64,), "ssm_in.weight": (128, 64), "ssm_conv1d.weight": (64, 4), "ssm_a": (4,),
    "ssm_dt.bias": (4,), "ssm_out.weight": (64, 64),
}  # fmt: skip
_ENCODER: dict[str, Shape] = {
    "attn_q.weight": (64, 64), "attn_q.bias": (64,), "attn_k.weight": (64, 64), "attn_k.bias": (64,),
    "attn_v.weight": (64, 64), "attn_v.bias": (64,), "attn_output.weight": (64, 64), "attn_output.bias": (64,),
    "attn_output_norm.weight": (64,), "attn_output_norm.bias": (64,), "ffn_up.weight": (96, 64), "ffn_up.bias": (96,),
    "ffn_down.weight": (64, 96), "ffn_down.bias": (64,), "layer_output_norm.weight": (64,),
    "layer_output_norm.bias": (64,),
}  # fmt: skip

_Blocks = tuple[Mapping[str, Shape], ...]
_KINDS: dict[str, tuple[dict[str, Any], _Blocks]] = {
    "dense": (_DECODER, (_ATTENTION | _NETWORK,) * 2),
    "moe": (
        _DECODER | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32},
        (_ATTENTION | _EXPERTS,) * 2,
    ),
    "hybrid": (
        _DECODER | {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.group_count": 1, "block_count": 4},
        (_RECURRENCE | _NETWORK, _ATTENTION | _NETWORK) * 2,
    ),
    "encoder": (
        {key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"}
        | {"attention.head_count_kv": 4, "attention.causal": False},
        (_ENCODER,) * 2,
    ),
}
KINDS = tuple(_KINDS)
"""Kinds of models that a skeleton can be like."""


def like(kind: str, architecture: str) -> Description:
    """Describe a small model of a kind."""
    keys, blocks = _KINDS[kind]
    shapes: dict[str, Shape] = {"token_embd.weight": (128, 64)}
    if kind == "encoder":
        shapes |= {"position_embd.weight": (256, 64), "token_embd_norm.weight": (64,), "token_embd_norm.bias": (64,)}
    else:
        shapes |= {"output_norm.weight": (64,), "output.weight": (128, 64)}
    shapes |= {f"blk.{i}.{name}": shape for i, block in enumerate(blocks) for name, shape in block.items()}
    return Description(architecture, keys, shapes)

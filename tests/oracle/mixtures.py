"""Record the tensor types of llama.cpp's quantized files: `python -m oracle.mixtures`.

Tensors are a few rows of zeros: choices depend on names, shapes and some keys only.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamacli.gguf import open_gguf
from llamacli.quantization import TensorType
from oracle.goldens import DIRECTORY
from oracle.quantizers import FILE_TYPES, peer_quantize, write_model

GOLDEN = DIRECTORY / "mixtures.json"
PURE, IMATRIX = "pure", "imatrix"
"""Words behind the name of a file type that is written without a mixture, or with an importance matrix."""

WEIGHED = (
    "Q4_0", "Q5_0", "Q2_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S",
    "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S",
)  # fmt: skip
"""File types recorded with an importance matrix."""

OVERRIDDEN = (
    "Q4_K_M attn_v=Q8_0 ffn_(gate|up)=IQ4_NL", "Q4_K_M pure attn_v=Q8_0", "Q3_K_M blk\\.[0-3]\\.=Q6_K v=Q5_0",
)  # fmt: skip
"""File types recorded with types of some tensors, by regexes."""

ONLY_WEIGHED = ("Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
"""File types that llama.cpp refuses to write without one."""

Shapes = dict[str, tuple[int, ...]]


def _layers(n: int, *stems: str, width: int = 256, n_expert: int = 0) -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer, stem in itertools.product(range(n), stems):
        rows = (width,) if stem.endswith("_norm") else (n_expert, 2, width) if stem.endswith("_exps") else (2, width)
        yield f"blk.{layer}.{stem}", rows


_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_ENDS: Shapes = {"token_embd": (3, 256), "output": (3, 256), "output_norm": (256,)}

CASES: dict[str, tuple[Shapes, dict[str, int]]] = {
    "grouped heads": (
        _ENDS | dict(_layers(18, *_ATTENTION, *_DENSE)),
        {"attention.head_count_kv": 2, "block_count": 18},
    ),
    "tied, equal heads": ({"token_embd": (3, 256)} | dict(_layers(11, *_ATTENTION, *_DENSE)), {"block_count": 11}),
    "eight experts": (
        _ENDS | dict(_layers(9, *_ATTENTION, *_EXPERTS, n_expert=8)),
        {"expert_count": 8, "expert_used_count": 2, "block_count": 9},
    ),
    "four experts": (
        _ENDS | dict(_layers(20, *_ATTENTION, *_EXPERTS, "ffn_down_shexp", n_expert=4)),
        {"expert_count": 4, "expert_used_count": 2, "block_count": 20, "attention.head_count_kv": 4},
    ),
    "eighty layers": (
        _ENDS | dict(_layers(80, "attn_v", "ffn_down")), {"attention.head_count_kv": 1, "block_count": 80},
    ),
    "fused": (_ENDS | dict(_layers(17, "attn_qkv", "attn_output", "ffn_up", "ffn_down")), {"block_count": 17}),
    "narrow": (
        {"token_embd": (3, 288), "output": (3, 288), "output_norm": (288,)}
        | dict(_layers(3, *_ATTENTION, "ffn_up", width=288))
        | dict(_layers(3, "ffn_down", width=172)),
        {"block_count": 3},
    ),
    "odd ones": (
        _ENDS
        | dict(_layers(2, "attn_v", "ffn_down", "ssm_conv1d", "time_mix_w1", "time_mix_w3", "attn_rel_b", "laurel_l"))
        | {"blk.0.one_row": (1, 256), "rope_freqs": (256,)}
        | {"position_embd": (2, 256), "per_layer_token_embd": (2, 256)},
        {"block_count": 2},
    ),
}  # fmt: skip
"""Shapes of tensors, without the `.weight` that all names end in, and keys of the architecture."""


def runs(types: Iterable[str]) -> str:
    """Types in a short form: `Q6_K*2 Q4_K`."""
    groups = ((name, len(list(group))) for name, group in itertools.groupby(types))
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in groups)


def by_stem(types: dict[str, str]) -> dict[str, str]:
    """The types of tensors of the same name, from layer to layer."""
    stems: dict[str, list[tuple[int, str]]] = {}
    for name, kind in types.items():
        parts = name.removesuffix(".weight").split(".")
        stems.setdefault(parts[-1], []).append((int(parts[1]) if len(parts) > 1 else 0, kind))
    return {stem: runs(kind for _, kind in sorted(found)) for stem, found in sorted(stems.items())}


def overridden(shapes: Shapes) -> list[str]:
    """File types with overrides that are all found in these names."""
    names = [f"{name}.weight" for name, shape in shapes.items() if len(shape) > 1]
    return [
        name
        for name in OVERRIDDEN
        if all(any(re.search(pattern, one) for one in names) for pattern, _ in overrides_of(name))
    ]


def overrides_of(name: str) -> list[tuple[str, TensorType]]:
    """Regexes and types behind the name of a file type."""
    parts = [option.rpartition("=") for option in name.split() if "=" in option]
    return [(pattern, TensorType[kind]) for pattern, _, kind in parts]


def _record() -> None:
    golden: dict[str, dict[str, dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "source.gguf", Path(temporary) / "target.gguf"
        for case, (shapes, metadata) in CASES.items():
            write_model(source, shapes, **metadata)
            ones = {
                f"{name}.weight": np.ones(math.prod(shape[:-2]) * shape[-1], np.float32)
                for name, shape in shapes.items()
            }
            plain = [name for name in FILE_TYPES if name not in (*ONLY_WEIGHED, "NVFP4")]
            for name in (*plain, f"Q4_K_M {PURE}", *(f"{name} {IMATRIX}" for name in WEIGHED), *overridden(shapes)):
                kind, *options = name.split()
                importance = ones if IMATRIX in options else None
                given: dict[str, Any] = {"importance": importance, "overrides": overrides_of(name)}
                peer_quantize(source, target, kind, pure=PURE in options, **given)
                with open_gguf(target) as file:
                    types = {info.name: info.type.name for info in file.tensors.values()}
                golden.setdefault(case, {})[name] = by_stem(types)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    _record()

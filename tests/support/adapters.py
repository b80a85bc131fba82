"""LoRA adapters of tiny models, and the cases of goldens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type
from llamacli.loaders import open_model_file
from llamacli.testing.models import write_gguf

SIGMA = 0.2
"""Standard deviation of the numbers: changes of the weights are about as large as these."""

Shape = tuple[int, ...]


def shapes_of(
    model: Path, rank: int, chosen: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[Shape, Shape]]:
    """Shapes of A and B for the chosen matrices of a file."""
    shapes = {}
    for name, info in open_model_file(model, []).tensors.items():
        if len(info.shape) < 2 or not name.endswith(".weight") or not chosen(name):
            continue
        *stack, n_out, n_in = info.shape
        if name.endswith("token_embd.weight"):
            shapes[name] = (n_out, rank), (n_in, rank)
        else:
            shapes[name] = (*stack, rank, n_in), (*stack, n_out, rank)
    return shapes


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float | None = 6.0,
    chosen: Callable[[str], bool] = lambda name: True,
    seed: str = "",
    stored: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a random adapter for a model file; return its path.

    It changes the matrices whose names are chosen.

    `metadata` and `tensors` are added or, with None, left out, for broken files.
    """
    architecture = open_model_file(model, []).metadata.get_str("general.architecture")
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, **(metadata or {})}
    arrays: dict[str, np.ndarray] = {}
    for name, pair in shapes_of(model, rank, chosen).items():
        for suffix, shape in zip(("lora_a", "lora_b"), pair, strict=True):
            full = f"{name}.{suffix}"
            number = int.from_bytes(hashlib.sha256(f"{seed}/{full}".encode()).digest()[:4], "little")
            arrays[full] = (SIGMA * np.random.RandomState(number).standard_normal(shape)).astype(np.float32)
    for name, array in (tensors or {}).items():
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array.astype(np.float32)
    kind = Type[stored]
    fits = gguf.GGML_QUANT_SIZES[kind][0]
    content = {
        name: (gguf.quants.quantize(array, kind), kind) if array.shape[-1] % fits == 0 else (array, Type.F32)
        for name, array in arrays.items()
    }
    name = keys.pop("general.architecture", architecture)
    write_gguf(path, name, keys, content)
    return path


@dataclass(frozen=True)
class Case:
    """Tiny model with adapters.

    Its variant, and the options and scale of each adapter.
    """

    variant: str
    adapters: tuple[tuple[Mapping[str, Any], float], ...] = (({}, 1.0),)

    def write(self, model: Path, folder: Path) -> list[tuple[Path, float]]:
        """Write the adapters for the model's file; returns their paths and scales."""
        return [
            (write_adapter(folder / f"{self.variant}-{i}.gguf", model, seed=str(i), **options), scale)
            for i, (options, scale) in enumerate(self.adapters)
        ]


def _tables(name: str) -> bool:
    return name == "token_embd.weight"


def _layers(name: str) -> bool:
    return name.startswith("blk.")


CASES = {
    "all": Case("gqa"),
    "scaled": Case("gqa", (({"alpha": 16.0, "rank": 3}, -0.5),)),
    "no_alpha": Case("gqa", (({"alpha": None}, 0.5),)),
    "embeddings": Case("gqa", (({"chosen": _tables}, 2.0),)),
    "two": Case("gqa", (({"chosen": _layers}, 0.75), ({"rank": 7}, 0.25))),
    "biases": Case("biases"),
    "f16": Case("gqa", (({"stored": "F16"}, 1.0),)),
    "q8_0": Case("gqa", (({"stored": "Q8_0", "rank": 32, "alpha": 8.0}, 1.0),)),
    "experts": Case("moe_8_2"),
    "expert_biases": Case("gptoss_gqa", (({"chosen": _layers}, 1.0),)),
    "fused": Case("phi3_gqa"),
    "shared_expert": Case("qwen2moe"),
    "softcapped": Case("gemma2", (({"chosen": _layers}, 1.0),)),
}

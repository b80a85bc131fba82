"""PEFT adapters: folders with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.checkpoints.file import EXPERT, Names, in_block, n_experts
from llamacli.checkpoints.keys import general_keys, settings_of
from llamacli.checkpoints.layout import Checkpoint, Settings
from llamacli.checkpoints.safetensors import SafetensorsFile, as_float
from llamacli.errors import ModelFormatError
from llamacli.gguf import TensorInfo, metadata_pair, write_gguf
from llamacli.quantization import TensorType
from llamacli.util.files import read_json, replacing

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PART = re.compile(r"(?:base_model\.model\.)?(?P<stem>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "bias": ("none", None), "fan_in_fan_out": (False, None), "alpha_pattern": ({}, None),
    "modules_to_save": ([], None), "layer_replication": (None,), "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
}  # fmt: skip
"""Fields of adapter_config.json that change what is computed, and the values that do not."""

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Changes of a matrix: `a` [rank, n_in] and `b` [n_out, rank]; of a table of embeddings, `a` is [n_vocab, rank].

Of experts, both are stacked: [n_expert, rank, n_in] and [n_expert, n_out, rank]."""


class PeftAdapter:
    """LoRA adapter of PEFT.

    `base` is the folder of its model, None unless adapter_config.json names one that is there.
    Raises ModelFormatError naming the file or field that is missing or not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        config = path / CONFIG
        self.fields = read_json(config)
        if (kind := self.fields.get("peft_type")) != "LORA":
            raise ModelFormatError(f"{config}: `peft_type` is {kind!r}, only 'LORA' is read")
        for field, plain in _PLAIN.items():
            if (value := self.fields.get(field)) not in plain:
                raise ModelFormatError(f"{config}: `{field}` is {value!r}, which a GGUF adapter cannot hold")
        if not (path / _WEIGHTS).is_file():
            raise ModelFormatError(
                f"{path}: {_WEIGHTS} is missing; a pickle, adapter_model.bin, could run code: save the adapter with "
                "`model.save_pretrained(folder)` of a current PEFT"
            )
        self._file = SafetensorsFile(path / _WEIGHTS)
        base = self.fields.get("base_model_name_or_path")
        self.base = Path(base) if isinstance(base, str) and Path(base, "config.json").is_file() else None

    @property
    def paths(self) -> list[Path]:
        """All its files."""
        return [self.path / CONFIG, self.path / _WEIGHTS]

    @property
    def alpha(self) -> float:
        """Alpha of GGUF: changes are multiplied by it over their rank.

        PEFT's own, times sqrt(rank) with `use_rslora`.
        """
        alpha, rank = self.fields.get("lora_alpha"), self.fields.get("r")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise ModelFormatError(f"{self.path / CONFIG}: `lora_alpha` is {alpha!r}, expected a number")
        if not self.fields.get("use_rslora"):
            return float(alpha)
        if not isinstance(rank, int) or self.fields.get("rank_pattern"):
            raise ModelFormatError(f"{self.path / CONFIG}: `use_rslora` needs one rank `r` for all matrices")
        return alpha * math.sqrt(rank)

    def pairs(self, checkpoint: Checkpoint, config: Mapping[str, Any], source: str) -> dict[str, Pair]:
        """Changes by the GGUF names of the matrices.

        `config` are the fields of the base's config.json, which is at `source`.
        Raises ModelFormatError naming the tensor that has no partner, no place in the base, or is no change at all.
        """
        settings = settings_of({**config, "tensor_names": ()}, checkpoint, source)
        n_layer = settings.get("num_hidden_layers")
        if not isinstance(n_layer, int):
            raise ModelFormatError(f"{source}: num_hidden_layers is missing")
        names, found = Names(checkpoint, settings, n_layer, source), dict[str, Pair]()
        for stem, (a, b) in self._stacked(settings):
            parts, n_parts = names.parts(names.plain(f"{stem}.weight"))
            if len(parts) > n_parts:
                raise ModelFormatError(
                    f"{self.path / _WEIGHTS}: {stem!r} becomes several tensors, and its changes cannot"
                )
            if a.shape[-2] != b.shape[-1] or b.shape[-2] % n_parts:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} is changed by {a.shape} and {b.shape}")
            for part, rows in zip(parts, np.split(b, len(parts), axis=-2), strict=True):
                target = names.target(part, f"{self.path / _WEIGHTS}: tensor {stem!r}")
                if target == "output.weight" and settings.get("tie_word_embeddings"):
                    raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} is the table of embeddings in {source}")
                conversion = checkpoint.convert.get(re.sub(r"^blk\.\d+\.", "", target))
                if conversion and conversion.computes:
                    raise ModelFormatError(f"{self.path / _WEIGHTS}: changes of {target} cannot be converted")
                left = a.T if target == "token_embd.weight" else a
                if conversion and conversion.columns:
                    left = conversion.apply(left, in_block(settings, target))
                elif conversion:
                    rows = conversion.apply(rows, in_block(settings, target))
                found[target] = (left, rows)
        names.check()
        return found

    def _stacked(self, settings: Settings) -> Iterator[tuple[str, Pair]]:
        """Changes of matrices, of experts stacked; an absent expert has none."""
        experts: dict[str, dict[int, Pair]] = {}
        for stem, pair in self._matrices():
            if match := EXPERT.fullmatch(stem):
                experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = pair
            else:
                yield stem, pair
        n_expert = n_experts(settings)
        for stem, pairs in experts.items():
            if n_expert is None or max(pairs) >= n_expert:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} has an expert {max(pairs)} of {n_expert}")
            shapes = {(a.shape, b.shape) for a, b in pairs.values()}
            if len(shapes) > 1:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} has experts of the shapes {sorted(shapes)}")
            ((of_a, of_b),) = shapes
            none = np.zeros(of_a, np.float32), np.zeros(of_b, np.float32)
            a, b = zip(*(pairs.get(i, none) for i in range(n_expert)), strict=True)
            yield stem, (np.stack(a), np.stack(b))

    def _matrices(self) -> Iterator[tuple[str, Pair]]:
        found: dict[str, dict[str, str]] = {}
        for name in self._file.entries:
            if ".base_layer.weight" in name:
                continue
            if (match := _PART.fullmatch(name)) is None:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: tensor {name!r} is neither lora_A nor lora_B")
            found.setdefault(match["stem"], {})[match["part"]] = name
        if not found:
            raise ModelFormatError(f"{self.path / _WEIGHTS}: the adapter has no tensors")
        for stem, parts in found.items():
            if missing := [part for part in "AB" if part not in parts]:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} has no lora_{missing[0]}")
            a, b = self._numbers(parts["A"]), self._numbers(parts["B"])
            if a.ndim != 2 or b.ndim != 2:
                raise ModelFormatError(f"{self.path / _WEIGHTS}: {stem!r} is changed by {a.shape} and {b.shape}")
            yield stem, (a, b)

    def _numbers(self, name: str) -> npt.NDArray[np.float32]:
        return as_float(self._file.array(name), self._file.entries[name].dtype).astype(np.float32, copy=False)

    def write(
        self, out: Path, checkpoint: Checkpoint, config: Mapping[str, Any], source: str, *, overwrite: bool = False
    ) -> list[TensorInfo]:
        """Write a GGUF adapter atomically; returns its tensors. Raises what `pairs` does."""
        pairs = self.pairs(checkpoint, config, source)
        arrays = {f"{name}.lora_{letter}": np.ascontiguousarray(part) for name, pair in pairs.items()
                  for letter, part in zip("ab", pair, strict=True)}  # fmt: skip
        keys = general_keys(self.path, checkpoint.architecture, {name: x.shape for name, x in arrays.items()}, None)
        keys |= {"adapter.type": "lora", "adapter.lora.alpha": self.alpha}
        kept = [metadata_pair(key, value) for key, value in keys.items() if value is not None]
        tensors = [
            TensorInfo(name=name, shape=array.shape, type=TensorType.F32, n_bytes=array.nbytes)
            for name, array in arrays.items()
        ]
        with replacing(out, overwrite=overwrite) as file:
            write_gguf(file, kept, tensors, lambda info: [arrays[info.name].view(np.uint8)])
        return tensors

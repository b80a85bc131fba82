"""Hugging Face folders: config.json and the index of their safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy.typing as npt

from llamacli.checkpoints.safetensors import Entry, SafetensorsFile, as_float
from llamacli.errors import ModelFormatError
from llamacli.util.files import read_json

_INDEX = "model.safetensors.index.json"
_TEXT = ("text_config", "llm_config", "lm_config", "language_config", "lfm", "transformer_layer_config",
         "talker_config")  # fmt: skip
"""Fields of config.json with the fields of a language model."""


class Folder:
    """Hugging Face folder.

    `config` are the fields of config.json, with those of a language model inside; `classes` its `architectures`, or
    without the file the names of the tensors. Raises ModelFormatError naming the file that is missing or wrong.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[Path, SafetensorsFile] = {}
        self.has_config = (path / "config.json").is_file()
        self.raw: dict[str, Any] = {}
        if self.has_config:
            self.raw = read_json(path / "config.json")
        elif any(path.glob("model*.safetensors")):
            self.raw = {"architectures": [*self.entries]}
        else:
            raise ModelFormatError(f"{path}: {self.without_config()}")
        places = (self.raw.get("thinker_config"), self.raw)
        inner: dict[str, Any] = next(
            (place[field] for place in places if place for field in _TEXT if isinstance(place.get(field), dict)), {}
        )
        self.config: dict[str, Any] = {**self.raw, **inner}
        classes = self.raw.get("architectures") or self.config.get("architectures")
        if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
            raise ModelFormatError(
                f"{path}/config.json: `architectures` is {classes!r}, expected a list such as "
                f'["{str(self.raw.get("model_type", "name")).title()}ForCausalLM"]'
            )
        self.classes: list[str] = classes

    def without_config(self) -> str:
        """Reason why a folder without config.json is not read."""
        names = sorted(entry.name for entry in self.path.iterdir())
        if not names:
            return "the folder is empty: no model"
        if "adapter_config.json" in names:
            return "a PEFT adapter, not a model: `llamacli convert` makes a file for --lora of it"
        if gguf := [name for name in names if name.endswith(".gguf")]:
            return f"a folder: name the file, such as {self.path / gguf[0]}"
        return "config.json is missing: this is no Hugging Face checkpoint, or its download is incomplete"

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Tensors by name, in the order of the shards."""
        weight_map = self._weight_map()
        names = sorted(set(weight_map.values())) if weight_map else self._parts()
        if missing := [name for name in names if not (self.path / name).is_file()]:
            raise ModelFormatError(
                f"{self.path}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:8])}; "
                "download the folder again"
            )
        found: dict[str, Entry] = {}
        for name in names:
            file = SafetensorsFile(self.path / name)
            self._files[file.path] = file
            for tensor, entry in file.entries.items():
                if tensor in found:
                    raise ModelFormatError(f"{file.path}: tensor {tensor!r} is in {found[tensor].path} as well")
                found[tensor] = entry
        if weight_map and (different := weight_map.keys() ^ found.keys()):
            first = sorted(different)[0]
            where = f"in {_INDEX}, not in {weight_map[first]}" if first in weight_map else f"not in {_INDEX}"
            raise ModelFormatError(
                f"{self.path}: {len(different)} tensors differ from the index, such as {first!r}: {where}; "
                "download the folder again"
            )
        return found

    def _weight_map(self) -> dict[str, str]:
        path = self.path / _INDEX
        if not path.is_file():
            return {}
        found = read_json(path).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(name, str) and "/" not in name for name in found.values()):
            raise ModelFormatError(f"{path}: `weight_map` is no object of file names")
        return found

    def _parts(self) -> list[str]:
        names = sorted(entry.name for entry in self.path.iterdir())
        if found := [name for name in names if name.startswith("model") and name.endswith(".safetensors")]:
            numbers = [match for name in found if (match := re.search(r"-(\d+)-of-(\d+)\.", name))]
            if numbers and len(numbers) != (n := int(numbers[0][2])):
                raise ModelFormatError(
                    f"{self.path}: {len(numbers)} of {n} shards, such as {found[0]}, and no {_INDEX}; "
                    "download the folder again"
                )
            return found
        if pickles := [name for name in names if name.endswith((".bin", ".pth", ".pt"))]:
            raise ModelFormatError(
                f"{self.path}: {pickles[0]} is a pickle, which could run code: save the model with "
                "`model.save_pretrained(folder, safe_serialization=True)` of transformers"
            )
        raise ModelFormatError(f"{self.path}: no tensors: neither {_INDEX} nor model*.safetensors is there")

    @cached_property
    def modules(self) -> dict[str, str]:
        """Folders of modules.json of sentence-transformers, the first of each type."""
        path = self.path / "modules.json"
        try:
            modules = json.loads(path.read_text("utf-8")) if path.is_file() else []
            return {module["type"].rpartition(".")[2]: module["path"] for module in reversed(modules)}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelFormatError(f"{path}: no list of modules, each with type and path: {error!r}") from error

    @property
    def pooling(self) -> int | None:
        """GGUF's number of the pooling that modules.json names."""
        found = self.modules.get("Pooling")
        if found is None:
            return None
        path = self.path / found / "config.json"
        fields = read_json(path)
        kinds = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
        for number, (kind, name) in enumerate(kinds.items(), 1):
            if fields.get(f"pooling_mode_{name}") or fields.get("pooling_mode") == kind:
                return number
        raise ModelFormatError(f"{path}: pooling is none of {', '.join(kinds)}")

    @property
    def files(self) -> list[Path]:
        """Files with tensors, after `entries`."""
        return list(self._files)

    def file(self, entry: Entry) -> SafetensorsFile:
        """Open file of a tensor."""
        return self._files[entry.path]

    def numbers(self, name: str, rows: slice | EllipsisType = ...) -> npt.NDArray[Any]:
        """Numbers of a tensor, or of these rows, integers as they are."""
        entry = self.entries[name]
        bits = self.file(entry).array(name)[rows]
        return as_float(bits, entry.dtype) if entry.dtype.startswith(("F", "BF")) else bits

    def describe(self) -> str:
        """Fields of config.json on one line, for messages."""
        return json.dumps({key: value for key, value in self.config.items() if isinstance(value, str | int | float)})

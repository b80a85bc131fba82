"""Checks of an architecture: files, and invalid files.

Each takes a tiny model and raises ConformanceError with the model, and the input or number at fault.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from llamacli.architecture import Architecture, Config, trace, trace_classifier, trace_dense, trace_nextn
from llamacli.errors import ModelFormatError
from llamacli.gguf import Metadata, TensorInfo
from llamacli.model import unread_keys
from llamacli.quantization import TensorType
from llamacli.tensor_table import TensorTable, Weights
from llamacli.testing.conformance import ConformanceError
from llamacli.testing.tiny import TinyModel


def check_tables(tiny: TinyModel) -> None:
    """Tables: every tensor and every key of a file is read."""
    metadata = tiny.metadata
    config, table, weights, graph = tiny.recorded(metadata)
    heads = (make(tiny.architecture, config, weights) for make in (trace_classifier, trace_dense))
    ops = [op for part in (graph, *heads) if part for op in part.ops]
    read = (
        {tensor.name for op in ops for tensor in op.tensors()}
        | table.unused
        | table.ignored(tiny.file)
        | tiny.read_besides
    )
    if unread := sorted(set(tiny.file.tensors) - read):
        raise ConformanceError(f"{tiny}: the forward pass leaves out {', '.join(unread)}")
    _expect_whole_head(tiny, config, table)
    unread_names = unread_keys(metadata, tiny.prefix.removesuffix("."))
    if keys := [key for key in unread_names if not any(fnmatch.fnmatch(key, pattern) for pattern in tiny.unread)]:
        raise ConformanceError(f"{tiny}: configure does not read {', '.join(keys)}")


def _expect_whole_head(tiny: TinyModel, config: Config, table: TensorTable) -> None:
    blocks = sorted({name.partition("nextn.")[0] for name in tiny.file.tensors if ".nextn." in name})
    if not table.has_nextn or not blocks:
        return
    head = trace_nextn(tiny.architecture, config, table.bind(tiny.file, nextn=True))
    read = {tensor.name for op in head.ops for tensor in op.tensors()} if head else set[str]()
    needed = [name for name, spec in table.items(nextn=True) if name.startswith(blocks[0]) and not spec.optional]
    if unread := sorted({*needed} & {*tiny.file.tensors} - read):
        raise ConformanceError(f"{tiny}: the multi-token-prediction head leaves out {', '.join(unread)}")


def check_keys(tiny: TinyModel) -> None:
    """Keys: a missing or invalid one is named."""
    metadata, values = tiny.metadata, dict(tiny.metadata)
    tiny.architecture.tensors(tiny.architecture.configure(metadata))
    for key in sorted(key for key in metadata.consumed if key.startswith(tiny.prefix) and key in values):
        _configure(tiny, key, "without it", {name: value for name, value in values.items() if name != key})
        for wrong, must_fail in _wrong_values(values[key]):
            found = f"with the value {wrong!r}"
            if not _configure(tiny, key, found, values | {key: wrong}) and must_fail:
                raise ConformanceError(f"{tiny}: {key} {found} is accepted")


def _wrong_values(value: object) -> Iterator[tuple[object, bool]]:
    """Values of other types and ranges, and whether they must be refused."""
    yield ("text" if not isinstance(value, str) else 3), True
    if isinstance(value, bool):
        yield 2, True
    elif isinstance(value, int):
        yield -1, True
        yield 1 << 40, False
    elif isinstance(value, float):
        yield float("nan"), True
        yield float("inf"), True
        yield -1.0, False
        yield 0.0, False


def _configure(tiny: TinyModel, key: str, found: str, values: Mapping[str, Any]) -> bool:
    metadata = Metadata(values, "model.gguf")
    try:
        tiny.architecture.tensors(tiny.architecture.configure(metadata))
    except ModelFormatError as error:
        if key not in str(error):
            raise ConformanceError(f"{tiny}: {key} {found} is not named in the error: {error}") from error
        return True
    except Exception as error:
        raise ConformanceError(
            f"{tiny}: {key} {found} raises {type(error).__name__}: {error}; expected a ModelFormatError that names it"
        ) from error
    return False


def _bind(table: TensorTable, path: str, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> Weights:
    """Bind a table to a file that has names and shapes only."""
    file: Any = SimpleNamespace(path=Path(path), metadata=metadata, tensors=tensors)
    return table.bind(file)


def check_shapes(architecture: Architecture, keys: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare an architecture's table with the tensor shapes of a file.

    `keys` are without the architecture's name in front; no weight is needed. Raises ModelFormatError naming what does
    not fit.
    """
    values = {f"{architecture.name}.{key}": np.array(x) if isinstance(x, list) else x for key, x in keys.items()}
    values |= {"general.architecture": architecture.name}
    values.setdefault(f"{architecture.name}.vocab_size", shapes["token_embd.weight"][0])
    metadata = Metadata(values, "file")
    tensors = {
        name: TensorInfo(name=name, shape=tuple(shape), type=TensorType.F32, n_bytes=0, offset=0)
        for name, shape in shapes.items()
    }
    _bind(architecture.tensors(architecture.configure(metadata)), "file", metadata, tensors)


def check_tensors(tiny: TinyModel) -> None:
    """Tensors: one that is missing, misshapen or unknown is named.

    Of blocks with the same tensors the first is tried.
    """
    tensors, binding = dict(tiny.file.tensors), _Binding.of(tiny)
    binding.refuses(tensors)
    blocks = first_blocks(tensors)
    for name, info in tensors.items():
        if block_of(name) not in blocks:
            continue
        binding.refuses({other: tensors[other] for other in tensors if other != name}, name, "is left out")
        larger = attrs.evolve(info, shape=(info.shape[0] + 1, *info.shape[1:]))
        if not binding.refuses(tensors | {name: larger}, name, f"has the shape {larger.shape}"):
            raise ConformanceError(f"{tiny}: tensor {name} of shape {larger.shape} is accepted, not only {info.shape}")
    for name in ("surplus.weight", "blk.0.surplus.weight", "blk.0.surplus", "blk.99.attn_norm.weight"):
        info = TensorInfo(name=name, shape=(3,), type=next(iter(tensors.values())).type, n_bytes=12, offset=0)
        if not binding.refuses(tensors | {name: info}, name, "is added"):
            raise ConformanceError(f"{tiny}: tensor {name}, which no table has, is accepted")


@attrs.frozen
class _Binding:
    tiny: TinyModel
    metadata: Metadata
    config: Config
    table: TensorTable

    @classmethod
    def of(cls, tiny: TinyModel) -> _Binding:
        config, table, _, _ = tiny.recorded(metadata := tiny.metadata)
        return cls(tiny, metadata, config, table)

    def refuses(self, tensors: Mapping[str, TensorInfo], name: str = "", what: str = "") -> bool:
        """True if tensors are refused.

        The error must name the one at fault. Where they are not, the forward pass must be recorded without error.
        """
        try:
            weights = _bind(self.table, "model.gguf", self.metadata, tensors)
        except ModelFormatError as error:
            if not name or not any(scope in str(error) for scope in self._scopes(name)):
                raise ConformanceError(
                    f"{self.tiny}: tensor {name} {what} is not named in the error: {error}"
                ) from error
            return True
        try:
            trace(self.tiny.architecture, self.config, weights)
        except ModelFormatError as error:
            if not all(part in str(error) for part in self._scopes(name)[0].rsplit(".", 1)):
                raise ConformanceError(f"{self.tiny}: tensor {name} {what} is not named in: {error}") from error
            return True
        except Exception as error:
            raise ConformanceError(
                f"{self.tiny}: tensor {name} {what}, and forward raises {type(error).__name__}: {error}"
            ) from error
        return False

    def _scopes(self, name: str) -> tuple[str, ...]:
        """Names that an error may say: without kind, and parts where fused."""
        scope = re.sub(r"\.(weight|bias|scale)$", "", name)
        return scope, *self.table.fused().get(scope, ())


def first_blocks(tensors: Mapping[str, TensorInfo]) -> set[int | None]:
    """First block of each kind by names and shapes; None for outside."""
    kinds: dict[int | None, set[tuple[str, tuple[int, ...]]]] = {}
    for name, info in tensors.items():
        kinds.setdefault(block_of(name), set()).add((re.sub(r"^(v\.)?blk\.\d+\.", "", name), info.shape))
    firsts = {frozenset(kind): block for block, kind in reversed(kinds.items())}
    return {*firsts.values(), None}


def block_of(name: str) -> int | None:
    """Block number of a tensor, None outside of blocks."""
    found = re.match(r"(?:v\.)?blk\.(\d+)\.", name)
    return int(found[1]) if found else None

"""Conversion of a model file to other tensor types, written as GGUF."""

import contextlib
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.conversion.imatrix import ImportanceMatrix
from llamacli.conversion.mixtures import Choice, FileType, choose, requires_imatrix
from llamacli.conversion.shards import SPLIT_KEYS, shard_pairs, shard_path
from llamacli.errors import InvalidRequestError, ModelFormatError, PluginError, plugin_errors
from llamacli.gguf import TensorInfo, metadata_pair, write_gguf
from llamacli.gguf.header import DEFAULT_ALIGNMENT
from llamacli.kernels.codebook_encoding import encode_codebook
from llamacli.kernels.encoding import encode
from llamacli.kernels.team import Team, check_threads
from llamacli.loaders import ModelFile
from llamacli.quantization import (
    BLOCK_FORMATS,
    CODEBOOK_TYPES,
    FORMATS,
    TensorType,
    block_size,
    codebook,
    dequantize,
    nbytes,
    quantize,
)
from llamacli.util.files import replacing

_QUANTIZATION_VERSION = 2
_CHUNK_ELEMENTS = 1 << 20

_INTEGERS = (TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)
_LARGEST = {TensorType.F32: math.inf, TensorType.BF16: 3.3895e38}
_LARGEST_HALF = 65504.0
"""Largest value of other types, whose values or scales are float16."""


class SourceFile(ModelFile, Protocol):
    """Model file to write as GGUF: GGUF or Hugging Face folder."""

    @property
    def paths(self) -> list[Path]:
        """All its files."""

    @property
    def alignment(self) -> int:
        """Alignment of tensor data in bytes."""

    def pair(self, key: str) -> bytes:
        """Return a metadata key with its value as raw bytes."""


@attrs.frozen
class PlannedTensor:
    """A tensor of the source and of the target file.

    `wanted` is the target type without fallback. `weights` are those of its columns in an importance matrix,
    float32 [n_matrices, n_columns], None without.
    """

    source: TensorInfo
    target: TensorInfo
    wanted: IntEnum
    weights: npt.NDArray[np.float32] | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def changes(self) -> bool:
        """True if the type changes."""
        return self.source.type != self.target.type

    @property
    def fell_back(self) -> bool:
        """True if rows do not fit the blocks of the wanted type."""
        return self.target.type != self.wanted

    @property
    def is_encoded(self) -> bool:
        """True if it changes to a type that kernels quantize to."""
        return self.changes and (self.target.type in BLOCK_FORMATS or self.target.type in CODEBOOK_TYPES)


@attrs.frozen
class Plan:
    """Conversion plan: all tensors in file order, and their importance matrix.

    Without a `file_type` the file's metadata are copied, its type too.
    """

    file: SourceFile
    file_type: FileType | None
    tensors: list[PlannedTensor]
    imatrix: ImportanceMatrix | None = None

    @property
    def requantized(self) -> list[PlannedTensor]:
        """Tensors that are already quantized and would be quantized again."""
        return [tensor for tensor in self.tensors if tensor.changes and block_size(tensor.source.type) > 1]

    @property
    def needs_kernels(self) -> bool:
        """True if a tensor changes to a block type, which needs kernels."""
        return any(tensor.is_encoded for tensor in self.tensors)

    @property
    def unweighted(self) -> list[PlannedTensor]:
        """Tensors to quantize that the importance matrix should have, but has not."""
        return [
            tensor
            for tensor in self.tensors
            if self.imatrix and tensor.is_encoded and tensor.weights is None and tensor.target.name.startswith("blk.")
        ]

    def check_imatrix(self) -> None:
        """Raise InvalidRequestError if a tensor lacks the weights that it needs.

        llama.cpp refuses those too: without an importance matrix the result is useless.
        """
        for tensor in self.tensors:
            name, kind = tensor.target.name, tensor.target.type
            if not tensor.changes or self.file_type is None:
                continue
            if tensor.weights is None and requires_imatrix(name, kind, self.file_type):
                lacks = f"{self.imatrix.path} has no entry of it" if self.imatrix else "none is given"
                raise InvalidRequestError(
                    f"{self.file.path}: tensor {name!r} would be {kind.name}, which needs an importance matrix, and "
                    f"{lacks}: llamacli imatrix makes one"
                )

    @property
    def n_params(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.target.shape) for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors in the target file."""
        return sum(tensor.target.n_bytes for tensor in self.tensors)


def plan(
    file: SourceFile,
    file_type: FileType,
    *,
    pure: bool = False,
    imatrix: ImportanceMatrix | None = None,
    overrides: Sequence[tuple[str, IntEnum]] = (),
) -> Plan:
    """Choose the type of every tensor.

    See `mixtures`. `overrides` are types by regexes of names. ModelFormatError if one cannot be dequantized;
    InvalidRequestError if an entry of the importance matrix has another size than its tensor.
    """
    has_imatrix = imatrix is not None
    options: dict[str, Any] = {"pure": pure, "has_imatrix": has_imatrix, "overrides": overrides}
    choices = choose(file.tensors.values(), file.metadata, file_type, **options)
    tensors = []
    for info in file.tensors.values():
        choice = choices.get(info.name, Choice(info.type, info.type))
        if choice.type == info.type:
            tensors.append(PlannedTensor(info, info, choice.wanted))
            continue
        if FORMATS[info.type].dequantize is None or info.type in _INTEGERS:
            raise ModelFormatError(
                f"{file.path}: tensor {info.name!r} of type {info.type.name} cannot be converted to {choice.type.name}"
            )
        target = attrs.evolve(info, type=choice.type, n_bytes=nbytes(choice.type, info.shape), offset=0)
        weights = imatrix.weights(info) if imatrix else None
        tensors.append(PlannedTensor(info, target, choice.wanted, weights))
    return Plan(file, file_type, tensors, imatrix)


def unchanged(file: SourceFile, file_type: FileType | None) -> Plan:
    """Plan that keeps the type of every tensor."""
    return Plan(file, file_type, [PlannedTensor(info, info, info.type) for info in file.tensors.values()])


def write(
    planned: Plan,
    path: Path,
    *,
    threads: int | None = None,
    overwrite: bool = False,
    shards: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the target file atomically, or with `shards` a split one.

    `shards` are the numbers of tensors in each, which are named as `shard_path` says. `progress` is called with bytes
    written and bytes in all. Metadata is copied bit by bit, except general.file_type, general.quantization_version and
    the keys of split files; without a file type all but the last, which become those that gguf-split writes. Keys
    quantize.imatrix.* name the importance matrix, as llama.cpp's do. Raises ModelFormatError if a tensor to convert has
    NaN or infinity; InvalidRequestError if values exceed the range of the type, a tensor needs an importance matrix,
    the file exists and `overwrite` is false, it is the model itself, or the disk is full.
    """
    planned.check_imatrix()
    file, tensors = planned.file, {tensor.target.name: tensor for tensor in planned.tensors}
    targets = [shard_path(path, i, len(shards)) for i in range(len(shards))] or [path]
    for target, source in itertools.product(targets, file.paths):
        if target.exists() and target.samefile(source):
            raise InvalidRequestError(f"{target} is a file of the source model: choose another file")
    folder = path.absolute().parent
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < planned.n_bytes:
        raise InvalidRequestError(f"{path} needs {planned.n_bytes} bytes, but the disk has only {free} free")
    n_written = 0

    def count(n_bytes: int) -> None:
        nonlocal n_written
        n_written += n_bytes
        progress(n_written, planned.n_bytes)

    team = Team(check_threads(threads))
    try:
        with contextlib.ExitStack() as opened:
            infos, merged, first = [tensor.target for tensor in planned.tensors], _merged(planned), 0
            for i, target in enumerate(targets):
                n = shards[i] if shards else len(infos)
                pairs = shard_pairs(i, len(shards), len(infos)) if shards else merged
                write_gguf(
                    opened.enter_context(replacing(target, overwrite=overwrite)),
                    pairs if i else [*_pairs(planned), *pairs],
                    infos[first : first + n],
                    lambda info: _data(file, tensors[info.name], team, count),
                    alignment=DEFAULT_ALIGNMENT if i else file.alignment,
                )
                first += n
    finally:
        team.close()


def _merged(planned: Plan) -> list[bytes]:
    """Keys that gguf-split leaves in a file that it merges."""
    is_merged = planned.file_type is None and len(planned.file.paths) > 1
    return shard_pairs(0, 0, len(planned.tensors)) if is_merged else []


def _pairs(planned: Plan) -> list[bytes]:
    file, file_type, imatrix = planned.file, planned.file_type, planned.imatrix
    ours: dict[str, int | str] = {}
    if file_type is not None:
        ours["general.quantization_version"] = _QUANTIZATION_VERSION
        ours["general.file_type"] = file_type.number
    if imatrix:
        ours |= {
            "quantize.imatrix.file": imatrix.path.name,
            "quantize.imatrix.entries_count": len(imatrix.entries),
            "quantize.imatrix.chunks_count": imatrix.chunk_count,
            **({"quantize.imatrix.dataset": imatrix.datasets[0]} if imatrix.datasets else {}),
        }
    kept = {key: file.pair(key) for key in file.metadata if key not in SPLIT_KEYS}
    return list((kept | {key: metadata_pair(key, value) for key, value in ours.items()}).values())


def _data(
    file: SourceFile, tensor: PlannedTensor, team: Team, count: Callable[[int], None]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Convert a tensor some rows at a time; yields bytes, uint8 arrays."""
    raw, width = file.data(tensor.source.name), tensor.source.shape[-1] if tensor.source.shape else 1
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    for first, last, matrix in _parts(tensor, len(raw), step):
        part = raw[first:last]
        weights = None if tensor.weights is None else tensor.weights[matrix]
        converted = _converted(part, file, tensor, team, weights) if tensor.changes else part
        yield converted
        file.release(tensor.source.name)
        count(converted.nbytes)


def _parts(tensor: PlannedTensor, n_rows: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of at most `step` rows of one matrix, with its number.

    Without weights matrices need not be told apart.
    """
    rows = n_rows if tensor.weights is None else n_rows // len(tensor.weights)
    for start in range(0, n_rows, max(1, rows)):
        for first in range(start, start + rows, step):
            yield first, min(first + step, start + rows), start // rows


def _converted(
    raw: npt.NDArray[np.uint8],
    file: SourceFile,
    tensor: PlannedTensor,
    team: Team,
    weights: npt.NDArray[np.float32] | None,
) -> npt.NDArray[Any]:
    source, kind = tensor.source, tensor.target.type
    x = dequantize(raw, source.type)
    largest = max(abs(float(x.max(initial=0))), abs(float(x.min(initial=0))))
    if not math.isfinite(largest):
        raise ModelFormatError(f"{file.path}: tensor {source.name!r} has NaN or infinity")
    if not isinstance(kind, TensorType):
        return _converted_by_plugin(x, file, tensor)
    in_codebook = kind in CODEBOOK_TYPES
    limit = min(_LARGEST_HALF, codebook(kind).largest) if in_codebook else _LARGEST.get(kind, _LARGEST_HALF)
    if largest > limit:
        raise InvalidRequestError(
            f"{file.path}: tensor {source.name!r} has {largest:g}, out of range of {kind.name}: use BF16 or F32"
        )
    if kind in BLOCK_FORMATS:
        fmt = BLOCK_FORMATS[kind]
        return fmt.pack(encode(team, fmt, x, weights))
    if in_codebook:
        book = codebook(kind)
        return book.pack(encode_codebook(team, book, x, weights))
    return quantize(x, kind)


def _converted_by_plugin(x: npt.NDArray[np.float32], file: SourceFile, tensor: PlannedTensor) -> npt.NDArray[Any]:
    target = tensor.target
    part = f"tensor type {target.type.name}"
    with plugin_errors(part):
        raw = np.asarray(quantize(x, target.type))
    shape = len(x), nbytes(target.type, x.shape[-1:])
    if raw.dtype != np.uint8 or raw.shape != shape:
        raise PluginError(f"{part}: quantize returned {raw.dtype} {raw.shape}, expected uint8 {shape}")
    with plugin_errors(part):
        back = dequantize(raw, target.type)
    if not np.isfinite(back).all():
        raise InvalidRequestError(
            f"{file.path}: tensor {target.name!r} is out of range of {target.type.name}: dequantized, it is not finite"
        )
    return raw

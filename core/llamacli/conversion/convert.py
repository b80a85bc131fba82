"""From one GGUF file to another whose tensors have other types, a part of a tensor at a time."""

import math
import shutil
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.conversion.mixtures import Choice, FileType, choose
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.gguf import GGUFFile, TensorInfo, uint32_pair, write_gguf
from llamacli.kernels.encoding import encode
from llamacli.kernels.team import Team, check_threads
from llamacli.quantization import BLOCK_FORMATS, FORMATS, TensorType, block_size, dequantize, nbytes, quantize
from llamacli.util.files import replacing

_QUANTIZATION_VERSION = 2
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_NUMBERS_AT_ONCE = 1 << 20

_INTEGERS = (TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64)
_LARGEST = {TensorType.F32: math.inf, TensorType.BF16: 3.3895e38}
_LARGEST_HALF = 65504.0
"""All other types have numbers or scales in float16."""


@attrs.frozen
class PlannedTensor:
    """A tensor as it is and as it will be; `wanted` is the type that it would have if its rows fitted the blocks."""

    source: TensorInfo
    target: TensorInfo
    wanted: IntEnum

    @property
    def changes(self) -> bool:
        """Whether it gets another type."""
        return self.source.type != self.target.type

    @property
    def fell_back(self) -> bool:
        """Whether it has another type than it should have."""
        return self.target.type != self.wanted


@attrs.frozen
class Plan:
    """What writing will do: all tensors in the file's order."""

    file: GGUFFile
    file_type: FileType
    tensors: list[PlannedTensor]

    @property
    def requantized(self) -> list[PlannedTensor]:
        """The tensors that are quantised already and would be anew."""
        return [tensor for tensor in self.tensors if tensor.changes and block_size(tensor.source.type) > 1]

    @property
    def needs_kernels(self) -> bool:
        """Whether something will be quantised in blocks."""
        return any(tensor.changes and tensor.target.type in BLOCK_FORMATS for tensor in self.tensors)

    @property
    def n_params(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.target.shape) for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors when they are written."""
        return sum(tensor.target.n_bytes for tensor in self.tensors)


def plan(file: GGUFFile, file_type: FileType, *, pure: bool = False) -> Plan:
    """Choose the type of every tensor; see `mixtures`. ModelFormatError if one cannot be read as numbers."""
    choices = choose(file.tensors.values(), file.metadata, file_type, pure=pure)
    tensors = []
    for info in file.tensors.values():
        choice = choices.get(info.name, Choice(info.type, info.type))
        if choice.type == info.type:
            tensors.append(PlannedTensor(info, info, choice.wanted))
            continue
        if FORMATS[info.type].dequantize is None or info.type in _INTEGERS:
            raise ModelFormatError(
                f"{file.path}: tensor {info.name!r} is of type {info.type.name}, which cannot become {choice.type.name}"
            )
        target = attrs.evolve(info, type=choice.type, n_bytes=nbytes(choice.type, info.shape), offset=0)
        tensors.append(PlannedTensor(info, target, choice.wanted))
    return Plan(file, file_type, tensors)


def write(
    planned: Plan,
    path: Path,
    *,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the new file. `progress` is called now and then with the bytes of tensors that are written, and all bytes.

    The file is complete or not there at all. All metadata is kept bit by bit, but for general.file_type,
    general.quantization_version and what says that the model is split. ModelFormatError if a tensor that changes holds
    NaN or infinity; InvalidRequestError if one holds numbers that its type cannot, if the file exists and is not to
    be overwritten, if it is the model itself, or if the disk has no room for it.
    """
    file, tensors = planned.file, {tensor.target.name: tensor for tensor in planned.tensors}
    for source in file.paths:
        if path.exists() and path.samefile(source):
            raise InvalidRequestError(f"{path} is the model that is read: write to another file")
    _check_room(path, planned)
    n_written = 0

    def count(n_bytes: int) -> None:
        nonlocal n_written
        n_written += n_bytes
        progress(n_written, planned.n_bytes)

    team = Team(check_threads(threads))
    try:
        with replacing(path, overwrite=overwrite) as out:
            write_gguf(
                out,
                _pairs(file, planned.file_type),
                [tensor.target for tensor in planned.tensors],
                lambda info: _data(file, tensors[info.name], team, count),
                alignment=file.alignment,
            )
    finally:
        team.close()


def _pairs(file: GGUFFile, file_type: FileType) -> list[bytes]:
    ours = {
        key: uint32_pair(key, value)
        for key, value in (
            ("general.quantization_version", _QUANTIZATION_VERSION),
            ("general.file_type", file_type.number),
        )
    }
    kept = {key: file.pair(key) for key in file.metadata if key not in _SPLIT_KEYS}
    return list((kept | ours).values())


def _check_room(path: Path, planned: Plan) -> None:
    folder = path.absolute().parent
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < planned.n_bytes:
        raise InvalidRequestError(f"{path} will have {planned.n_bytes} bytes, and only {free} are free there")


def _data(
    file: GGUFFile, tensor: PlannedTensor, team: Team, count: Callable[[int], None]
) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes in its new type, some rows at a time."""
    raw, width = file.data(tensor.source.name), tensor.source.shape[-1] if tensor.source.shape else 1
    step = max(1, _NUMBERS_AT_ONCE // max(1, width))
    for row in range(0, len(raw), step):
        part = raw[row : row + step]
        converted = _converted(part, file, tensor, team) if tensor.changes else part
        yield converted
        file.release(tensor.source.name)
        count(converted.nbytes)


def _converted(raw: npt.NDArray[np.uint8], file: GGUFFile, tensor: PlannedTensor, team: Team) -> npt.NDArray[Any]:
    source, kind = tensor.source, TensorType(tensor.target.type)
    x = dequantize(raw, source.type)
    largest = max(abs(float(x.max(initial=0))), abs(float(x.min(initial=0))))
    if not math.isfinite(largest):
        raise ModelFormatError(f"{file.path}: tensor {source.name!r} holds NaN or infinity")
    if largest > _LARGEST.get(kind, _LARGEST_HALF):
        raise InvalidRequestError(
            f"{file.path}: tensor {source.name!r} holds {largest:g}, more than {kind.name} can: take BF16 or F32"
        )
    if kind in BLOCK_FORMATS:
        fmt = BLOCK_FORMATS[kind]
        return fmt.pack(encode(team, fmt, x))
    return quantize(x, kind)

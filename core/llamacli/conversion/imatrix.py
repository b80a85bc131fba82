"""Importance matrices (imatrix): llama.cpp's files in GGUF and .dat format.

An entry holds the sums of the squared inputs of a matrix, or of each matrix of a stack, and how many inputs were
summed. The GGUF format has two tensors for each, NAME.in_sum2 and NAME.counts. The older .dat format has means
instead, each times a number of chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, ModelFormatError, ModelNotFoundError
from llamacli.gguf import TensorInfo, is_gguf, metadata_pair, open_gguf, write_gguf
from llamacli.quantization import TensorType
from llamacli.util.files import replacing

Floats = npt.NDArray[np.float32]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


@attrs.frozen(eq=False)
class Importance:
    """Squared inputs of a matrix, or of a stack of matrices.

    `sums`: float32 [n_counts, n_values]; `counts`: float32 [n_counts], one for all matrices of a stack or one for each.
    """

    sums: Floats
    counts: Floats

    @property
    def means(self) -> Floats:
        """Mean squared inputs, float32 [n_counts * n_values]; 1 for experts never chosen."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), 1).astype(np.float32).reshape(-1)


@attrs.frozen(eq=False)
class ImportanceMatrix:
    """Importance matrix of a model: entries by the names of tensors.

    `datasets` are the texts that it was computed from, in `chunk_count` chunks of `chunk_size` tokens (0 if unknown).
    """

    path: Path
    entries: Mapping[str, Importance]
    datasets: Sequence[str]
    chunk_count: int
    chunk_size: int

    def weights(self, info: TensorInfo) -> Floats | None:
        """Weights of a tensor's columns, float32 [n_matrices, n_columns].

        None if it has no entry; InvalidRequestError if the entry has another size.
        """
        entry = self.entries.get(info.name)
        if entry is None:
            return None
        means, n_columns = entry.means, info.shape[-1]
        n_matrices = int(np.prod(info.shape[:-2]))
        if means.size != n_matrices * n_columns:
            raise InvalidRequestError(
                f"{self.path}: the entry of {info.name!r} has {means.size} numbers, but the tensor's shape "
                f"{tuple(info.shape)} needs {n_matrices * n_columns}: is it of another model?"
            )
        return means.reshape(n_matrices, n_columns)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read an importance matrix in either format.

    Raises ModelFormatError, naming the entry, if it is malformed or has numbers that are negative or not finite.
    """
    if not path.exists():
        raise ModelNotFoundError(path)
    matrix = _read_gguf(path) if is_gguf(path) else _read_dat(path)
    if not matrix.entries:
        raise ModelFormatError(f"{path}: the importance matrix has no entries")
    for name, entry in matrix.entries.items():
        for numbers in (entry.sums, entry.counts):
            if not np.isfinite(numbers).all() or (numbers < 0).any():
                raise ModelFormatError(f"{path}: the entry of {name!r} has numbers that are negative or not finite")
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    with open_gguf(path) as file:
        kind = file.metadata.get_str("general.type", "")
        if kind != "imatrix":
            raise ModelFormatError(f"{path}: general.type is {kind!r}, not 'imatrix': it is no importance matrix")
        entries = {}
        for name in file.tensors:
            if not name.endswith(_SUMS):
                continue
            stem = name.removesuffix(_SUMS)
            if stem + _COUNTS not in file.tensors:
                raise ModelFormatError(f"{path}: {name!r} has no {stem + _COUNTS!r}")
            sums, counts = file.tensor(name), file.tensor(stem + _COUNTS).reshape(-1)
            if not counts.size or sums.size % counts.size or not sums.size:
                raise ModelFormatError(f"{path}: {name!r} has {sums.size} numbers for {counts.size} counts")
            entries[stem] = Importance(sums.reshape(counts.size, -1).copy(), counts.copy())
        found = file.metadata.get(_DATASETS, ())
        if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(one, str) for one in found):
            raise ModelFormatError(f"{path}: {_DATASETS} is {found!r}, not a list of strings")
        datasets = [*found]
        count, size = (file.metadata.get_int(key, 0, minimum=0) for key in (_CHUNK_COUNT, _CHUNK_SIZE))
    return ImportanceMatrix(path, entries, datasets, count, size)


def _read_dat(path: Path) -> ImportanceMatrix:
    data, place, entries = path.read_bytes(), 0, {}

    def take(n: int, what: str) -> bytes:
        nonlocal place
        if n < 0 or place + n > len(data):
            needed = f"{what} needs {n} bytes at {place} of {len(data)}"
            raise ModelFormatError(f"{path}: {needed}: it is no importance matrix, or truncated")
        place += n
        return data[place - n : place]

    def integer(what: str) -> int:
        return int.from_bytes(take(4, what), "little", signed=True)

    def text(what: str) -> str:
        return take(integer(what), what).decode("utf-8", "replace")

    for number in range(integer("the number of entries")):
        name = text(f"the name of entry {number}")
        n_calls, n_values = integer(f"entry {name!r}"), integer(f"entry {name!r}")
        sums = np.frombuffer(take(4 * n_values, f"entry {name!r}"), "<f4").astype(np.float32)
        if not sums.size:
            raise ModelFormatError(f"{path}: the entry of {name!r} has no numbers")
        entries[name] = Importance(sums[None], np.array([max(1, n_calls)], np.float32))
    n_chunks = max(0, integer("the number of chunks")) if place < len(data) else 0
    datasets = [text("the dataset")] if place < len(data) else []
    return ImportanceMatrix(path, entries, datasets, n_chunks, 0)


def write_imatrix(matrix: ImportanceMatrix, *, overwrite: bool = False) -> None:
    """Write an importance matrix in GGUF, atomically, sorted as llama.cpp does."""
    arrays: dict[str, Floats] = {}
    for name in sorted(matrix.entries):
        entry = matrix.entries[name]
        arrays[name + _SUMS] = np.ascontiguousarray(entry.sums, "<f4")
        arrays[name + _COUNTS] = np.ascontiguousarray(entry.counts[:, None], "<f4")
    keys: dict[str, int | str | Sequence[str]] = {
        "general.type": "imatrix", _DATASETS: matrix.datasets, _CHUNK_COUNT: matrix.chunk_count,
        _CHUNK_SIZE: matrix.chunk_size,
    }  # fmt: skip
    pairs = [metadata_pair(key, value) for key, value in keys.items()]
    infos = [TensorInfo(name, array.shape, TensorType.F32, array.nbytes) for name, array in arrays.items()]
    with replacing(matrix.path, overwrite=overwrite) as out:
        write_gguf(out, pairs, infos, lambda info: [arrays[info.name].reshape(-1).view(np.uint8)])

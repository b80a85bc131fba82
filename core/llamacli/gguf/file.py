"""Memory-mapped GGUF files, single or split."""

import contextlib
import errno
import math
import mmap
import os
import re
import stat
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ClosedError, ModelFormatError, ModelNotFoundError
from llamacli.gguf.header import MAGIC, Header, TensorInfo, parse_header
from llamacli.quantization import dequantize, nbytes

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Test for GGUF's magic number; False if the file cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def open_gguf(path: str | os.PathLike[str]) -> "GGUFFile":
    """Open a GGUF file, or a split one by any shard.

    All shards must be in the same folder. Reads headers only. ModelFormatError, naming the file and the key or tensor,
    when a file cannot be read or is not well formed, when tensor data is missing at its end, or when the shards do not
    belong together.
    """
    shard = _Shard.open(Path(path))
    shards = _open_split(shard) if shard.header.metadata.get_int("split.count", 0, minimum=0) > 1 else [shard]
    return GGUFFile(shards)


@attrs.frozen(eq=False)
class _Shard:
    path: Path
    header: Header
    mapping: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> "_Shard":
        try:
            is_regular = stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            raise ModelNotFoundError(path) from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not is_regular:  # opening a pipe would block
            raise ModelFormatError(f"{path}: not a regular file")
        try:
            with open(path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        header = parse_header(mapping, str(path))
        for info in header.tensors.values():
            if info.offset + info.n_bytes > len(mapping):
                raise ModelFormatError(
                    f"{path}: tensor {info.name!r} ends at byte {info.offset + info.n_bytes}, "
                    f"beyond the end of the file at {len(mapping)}: is it truncated?"
                )
        return cls(path, header, mapping)

    def split_keys(self) -> tuple[int, int]:
        """Return this shard's number, counted from 0, and the number of shards."""
        metadata = self.header.metadata
        return metadata.get_int("split.no"), metadata.get_int("split.count")


def _unreadable(path: Path, error: Exception) -> ModelFormatError:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # address space: pages need no memory yet
        size = path.stat().st_size / (1 << 30)
        return ModelFormatError(
            f"{path}: the file has {size:.1f} GiB, and the address space of this process is limited (ulimit -v): "
            "raise the limit, or take a smaller quantization"
        )
    return ModelFormatError(f"{path}: cannot read the file: {getattr(error, 'strerror', None) or error}")


def _open_split(named: _Shard) -> list[_Shard]:
    number, count = named.split_keys()
    match = _SHARD_NAME.fullmatch(named.path.name)
    if match is None or (int(match["number"]) - 1, int(match["count"])) != (number, count):
        raise ModelFormatError(
            f"{named.path}: shard {number + 1} of {count} must be named like *-{number + 1:05}-of-{count:05}.gguf"
        )
    names = [f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    shards = [named if i == number else _Shard.open(named.path.with_name(name)) for i, name in enumerate(names)]
    for i, shard in enumerate(shards):
        if shard.split_keys() != (i, count):
            raise ModelFormatError(
                "{}: split.no {} of split.count {} where {} of {} belongs".format(
                    shard.path, *shard.split_keys(), i, count
                )
            )
    n_tensors = sum(len(shard.header.tensors) for shard in shards)
    if (expected := shards[0].header.metadata.get_int("split.tensors.count")) != n_tensors:
        raise ModelFormatError(f"{named.path}: split.tensors.count is {expected}, but the shards have {n_tensors}")
    return shards


class GGUFFile(contextlib.AbstractContextManager["GGUFFile"]):
    """An open GGUF file.

    Attributes: `path`, `version`, `alignment`, `metadata`, `tensors` by name, and `n_bytes` on disk. A split model
    looks like one file: the first shard's path and metadata, all shards' tensors; `paths` are the paths of all shards,
    and `shards` the number of each tensor's one.
    Arrays from data() stay valid after close().
    """

    def __init__(self, shards: list[_Shard]):
        first = shards[0]
        self.path = first.path
        self.version = first.header.version
        self.alignment = first.header.alignment
        self.metadata = first.header.metadata
        self.n_bytes = sum(len(shard.mapping) for shard in shards)
        self.tensors: dict[str, TensorInfo] = {}
        self.paths = [shard.path for shard in shards]
        self.shards = [number for number, shard in enumerate(shards) for _ in shard.header.tensors]
        self._first: _Shard | None = first
        self._shard_of: dict[str, _Shard] | None = {}
        for shard in shards:
            for name, info in shard.header.tensors.items():
                if name in self.tensors:
                    raise ModelFormatError(f"{shard.path}: tensor {name!r} is in {self._shard_of[name].path} as well")
                self.tensors[name] = info
                self._shard_of[name] = shard

    def pair(self, key: str) -> bytes:
        """Return a metadata key with its value as raw bytes, for copies."""
        if self._first is None:
            raise ClosedError(f"{self.path} is closed")
        start, end = self._first.header.spans[key]
        return self._first.mapping[start:end]

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes: a read-only view, uint8 [n_rows, row_bytes].

        All dimensions but the last are flattened into rows; a 1-D tensor is one row. ModelFormatError when there is no
        such tensor, or when the file has shrunk since it was opened.
        """
        info, shard = self._locate(name)
        if shard.mapping.size() < len(shard.mapping):  # reading beyond the end raises SIGBUS
            raise ModelFormatError(f"{shard.path}: the file was truncated while open: tensor {name!r} cannot be read")
        raw = np.frombuffer(shard.mapping, np.uint8, info.n_bytes, info.offset)
        return raw.reshape(math.prod(info.shape[:-1]), nbytes(info.type, info.shape[-1:]))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor dequantized to float32 in its `shape`."""
        raw, (info, shard) = self.data(name), self._locate(name)
        try:
            return dequantize(raw, info.type).reshape(info.shape)
        except ModelFormatError as error:
            raise ModelFormatError(f"{shard.path}: tensor {name!r}: {error}") from error

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory (MADV_DONTNEED); touching reads them again."""
        info, shard = self._locate(name)
        if hasattr(mmap, "MADV_DONTNEED") and info.n_bytes:
            start = info.offset - info.offset % mmap.PAGESIZE
            shard.mapping.madvise(mmap.MADV_DONTNEED, start, info.offset + info.n_bytes - start)

    def close(self) -> None:
        """Close the file; the mapping lives as long as data() arrays."""
        self._first = self._shard_of = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self, name: str) -> tuple[TensorInfo, _Shard]:
        if self._shard_of is None:
            raise ClosedError(f"{self.path} is closed")
        try:
            return self.tensors[name], self._shard_of[name]
        except KeyError:
            raise ModelFormatError(f"{self.path}: tensor {name!r} is missing") from None

"""Opening model files: GGUF in the core, other formats through loaders that plugins register."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError, plugin_errors
from llamacli.gguf import Metadata, TensorInfo, is_gguf, open_gguf
from llamacli.quantization import TensorType

if TYPE_CHECKING:
    from llamacli.plugins import Plugins

_log = logging.getLogger(__name__)


class ModelFile(Protocol):
    """What the core needs of an open model file; `llamacli.gguf.GGUFFile` and `ArrayFile` are two."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def metadata(self) -> Metadata:
        """Its keys, named and typed as in GGUF."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by their GGUF names."""

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, uint8 [n_rows, row_bytes]."""

    def release(self, name: str) -> None:
        """One tensor will hardly be read again: its memory may be given back."""

    def close(self) -> None:
        """Give back what it holds."""


class ArrayFile:
    """A model file that a loader has read into float32 arrays."""

    def __init__(self, path: Path, metadata: Metadata, arrays: Mapping[str, npt.NDArray[np.float32]]):
        self.path, self.metadata = path, metadata
        self._arrays = dict(arrays)
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(name=name, shape=array.shape, type=TensorType.F32, n_bytes=array.nbytes, offset=0)
            for name, array in self._arrays.items()
        }

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, uint8 [n_rows, row_bytes]."""
        array = np.ascontiguousarray(self._arrays[name], np.float32)
        return array.reshape(-1, array.shape[-1]).view(np.uint8)

    def release(self, name: str) -> None:
        """Nothing: what was read from another format cannot be read again."""

    def close(self) -> None:
        """Drop the arrays."""
        self._arrays.clear()


Progress = Callable[[int, int], None]
"""Called again and again with how much of something is done, and how much there is."""


class WatchedFile:
    """An open model file that reports how many bytes of its tensors have been gone through.

    Engines read tensors one after another: one is done when the next is asked for. `done` reports the last.
    """

    def __init__(self, file: ModelFile, progress: Progress):
        self._file, self._progress = file, progress
        self._n_bytes = sum(info.n_bytes for info in file.tensors.values())
        self._asked: set[str] = set()
        self._before = self._latest = 0
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, uint8 [n_rows, row_bytes]."""
        if name not in self._asked and name in self.tensors:
            self._asked.add(name)
            self._before += self._latest
            self._latest = self.tensors[name].n_bytes
            self._progress(self._before, self._n_bytes)
        return self._file.data(name)

    def release(self, name: str) -> None:
        """One tensor will hardly be read again: its memory may be given back."""
        self._file.release(name)

    def done(self) -> None:
        """All has been read that will be."""
        self._progress(self._n_bytes, self._n_bytes)

    def close(self) -> None:
        """Give back what the file holds."""
        self._file.close()


@attrs.frozen
class Loader:
    """A file format other than GGUF: `matches(path)` looks at a file's beginning, `open(path)` reads it.

    `open` raises ModelFormatError.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], ModelFile]


def open_model_file(path: str | os.PathLike[str], plugins: Plugins) -> ModelFile:
    """Open a model file of any format that is known.

    Raises ModelFormatError if the file cannot be read or no format fits it.
    """
    if not os.fspath(path):  # Path("") would be the current folder
        raise ModelFormatError("the name of the model's file is empty")
    path = Path(path)
    loaders = plugins.loaders()  # also brings in the tensor types that plugins add, which GGUF files may have too
    if not path.is_file() or is_gguf(path):
        return open_gguf(path)
    for loader in loaders:
        if _matches(loader, path):
            with plugin_errors(f"loader {loader.name!r}"):
                return loader.open(path)
    known = ", ".join(["GGUF", *(loader.name for loader in loaders)])
    raise ModelFormatError(f"{path}: not a model file of a known format ({known})")


def _matches(loader: Loader, path: Path) -> bool:
    """Whether a loader claims a file; one that fails over it does not, and disturbs no other."""
    try:
        return loader.matches(path)
    except Exception as error:
        _log.warning("loader %r failed over %s: %s: %s", loader.name, path, type(error).__name__, error)
        return False


_SAMPLE = 4096


def identity(file: ModelFile) -> str:
    """What tells a model from others, as hex: its scalar metadata, its tensors, and both ends of each one's data.

    Reading all of a file would take longer than loading it; models that differ anywhere differ in many tensors' ends.
    """
    digest = hashlib.sha256()
    for key in sorted(file.metadata):
        value = file.metadata[key]
        if isinstance(value, (str, int, float)):
            digest.update(repr((key, value)).encode())
    for name in sorted(file.tensors):
        info, data = file.tensors[name], file.data(name).reshape(-1)
        digest.update(repr((name, tuple(info.shape), int(info.type), data.size)).encode())
        digest.update(data[:_SAMPLE].tobytes() + data[-_SAMPLE:].tobytes())
    return digest.hexdigest()

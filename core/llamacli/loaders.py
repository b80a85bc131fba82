"""Model files: GGUF, and formats of loaders that plugins register."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError, plugin_errors
from llamacli.gguf import Metadata, TensorInfo, is_gguf, open_gguf
from llamacli.quantization import TensorType

_log = logging.getLogger(__name__)


class ModelFile(Protocol):
    """Interface of an open model file; `llamacli.gguf.GGUFFile` and `ArrayFile` implement it."""

    @property
    def path(self) -> Path:
        """Its path."""

    @property
    def metadata(self) -> Metadata:
        """Its metadata keys, named and typed as in GGUF."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by their GGUF names."""

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""

    def release(self, name: str) -> None:
        """Free the memory of one tensor, which will hardly be read again."""

    def close(self) -> None:
        """Free its memory."""


@attrs.frozen
class LabelledFile:
    """View of a model file whose tensors' names begin with a `label`.

    They are beside the tensors of another model then.
    """

    file: ModelFile
    label: str

    @property
    def path(self) -> Path:
        """Its path."""
        return self.file.path

    @property
    def metadata(self) -> Metadata:
        """Its metadata keys."""
        return self.file.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Its tensors by name."""
        return {f"{self.label}{name}": info for name, info in self.file.tensors.items()}

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""
        return self.file.data(name.removeprefix(self.label))

    def release(self, name: str) -> None:
        """Free the memory of one tensor, which will hardly be read again."""
        self.file.release(name.removeprefix(self.label))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


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
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""
        array = np.ascontiguousarray(self._arrays[name], np.float32)
        return array.reshape(-1, array.shape[-1]).view(np.uint8)

    def release(self, name: str) -> None:
        """Do nothing: the arrays cannot be read from the file again."""

    def close(self) -> None:
        """Drop the arrays."""
        self._arrays.clear()


Progress = Callable[[int, int], None]
"""Progress callback: called with the amount done and the total, as `done` and `total`."""


class WatchedFile:
    """Model file that reports reading progress in bytes of tensors.

    Engines read tensors one after another: one counts as read when the next is asked for. `done` reports the last.
    """

    def __init__(self, file: ModelFile, progress: Progress):
        self._file, self._progress = file, progress
        self._n_bytes = sum(info.n_bytes for info in file.tensors.values())
        self._asked: set[str] = set()
        self._before = self._latest = 0
        self.path, self.metadata, self.tensors = file.path, file.metadata, file.tensors

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of one tensor, uint8 [n_rows, row_bytes]."""
        if name not in self._asked and name in self.tensors:
            self._asked.add(name)
            self._before += self._latest
            self._latest = self.tensors[name].n_bytes
            self._progress(self._before, self._n_bytes)
        return self._file.data(name)

    def release(self, name: str) -> None:
        """Free the memory of one tensor, which will hardly be read again."""
        self._file.release(name)

    def done(self) -> None:
        """Report that no more will be read."""
        self._progress(self._n_bytes, self._n_bytes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unwatched(file: ModelFile) -> ModelFile:
    """File whose reading is not reported."""
    return file._file if isinstance(file, WatchedFile) else file


@attrs.frozen
class Loader:
    """File format other than GGUF.

    `matches(path)` looks at a file's beginning, `open(path)` reads it. `open` raises ModelFormatError. With `folders`
    both take folders, never files.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], ModelFile]
    folders: bool = False


def open_model_file(path: str | os.PathLike[str], loaders: Sequence[Loader]) -> ModelFile:
    """Open a GGUF file, or another format with the first matching loader.

    `llamacli.plugins.Plugins.loaders` returns those of the plugins, and registers their tensor types, which GGUF files
    may have too. Raises ModelFormatError if the file cannot be read or no format fits it.
    """
    if not os.fspath(path):  # Path("") would be the current folder
        raise ModelFormatError("the name of the model's file is empty")
    path = Path(path)
    is_folder = path.is_dir()
    loaders = [loader for loader in loaders if loader.folders == is_folder]
    if is_gguf(path) or (not path.is_file() and not (is_folder and loaders)):
        return open_gguf(path)
    for loader in loaders:
        if _matches(loader, path):
            with plugin_errors(f"loader {loader.name!r}"):
                return loader.open(path)
    known = ", ".join(["GGUF", *(loader.name for loader in loaders)])
    raise ModelFormatError(f"{path}: {_beginning(path) or f'not a model file of a known format ({known})'}")


def _beginning(path: Path) -> str | None:
    """Fault of a download, recognised by the file's first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(512).lstrip().lower()
    except OSError as error:
        return f"cannot read the file: {error.strerror}"
    if not start:
        return "the file is empty: was its download interrupted?"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the model: `git lfs pull` in its folder fetches the file"
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not a model: download the file itself, at an address with /resolve/ instead of /blob/"
    if path.suffix.lower() == ".safetensors":
        return f"weights in safetensors: give the folder with their config.json, as in llamacli run {path.parent}/"
    return None


def _matches(loader: Loader, path: Path) -> bool:
    try:
        return loader.matches(path)
    except Exception as error:
        _log.warning("loader %r failed over %s: %s: %s", loader.name, path, type(error).__name__, error)
        return False


_SAMPLE = 4096


def identity(file: ModelFile) -> str:
    """Digest of a model, as hex.

    It covers scalar metadata, tensors, and both ends of each one's data. Hashing all of a file would take longer than
    loading it; models that differ anywhere differ in many tensors' ends.
    """
    digest = hashlib.sha256()
    for key in sorted(file.metadata):
        value = file.metadata.peek(key)
        if isinstance(value, (str, int, float)):
            digest.update(repr((key, value)).encode())
    for name in sorted(file.tensors):
        info, data = file.tensors[name], file.data(name).reshape(-1)
        digest.update(repr((name, tuple(info.shape), int(info.type), data.size)).encode())
        digest.update(data[:_SAMPLE].tobytes() + data[-_SAMPLE:].tobytes())
        file.release(name)
    return digest.hexdigest()

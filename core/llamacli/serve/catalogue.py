"""Catalogue of models that clients pull, create, copy and delete.

A folder with a manifest for each name (`manifests`), files by their SHA-256 (`blobs`), and files of the hub (`hub`). A
name is never a path: nothing outside of the folder is read, written or removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import attrs

from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.gguf import open_gguf
from llamacli.serve.models import ModelSource
from llamacli.serve.requests import Preset
from llamacli.util.files import make_own_folder, replacing

_WORD = r"\w[\w.-]*"
_NAME = re.compile(rf"(?:{_WORD}/){{0,3}}{_WORD}(?::{_WORD})?", re.ASCII)
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MAX_NAME = 200
_LOOK_S = 0.2


@attrs.frozen
class Manifest:
    """Model of the catalogue: files below its folder, and a preset.

    `files` are the parts of its GGUF file in order, `adapters` LoRA adapters.
    """

    files: list[str]
    adapters: list[str] = attrs.field(factory=list)
    preset: Preset = attrs.field(factory=Preset)


class Catalogue:
    """Folder of models; methods may be called from any thread."""

    def __init__(self, folder: Path):
        """Make the folder if there is none.

        Raises OSError, also if others can write to it.
        """
        self.folder = folder.absolute()
        for part in (self.folder, self.folder / "manifests", self.folder / "blobs", self.folder / "hub"):
            make_own_folder(part)
        self._lock = threading.RLock()
        self._busy: set[str] = set()
        self._freed = threading.Condition(self._lock)

    @property
    def hub(self) -> Path:
        """Folder of the hub's files, as `huggingface_hub` lays it out."""
        return self.folder / "hub"

    def names(self) -> list[str]:
        """Names of all models."""
        return sorted(unquote(path.stem) for path in (self.folder / "manifests").glob("*.json"))

    def sources(self) -> list[ModelSource]:
        """Models whose files are there."""
        found = []
        for name in self.names():
            with contextlib.suppress(ModelFormatError, OSError):
                found.append(self.source(name))
        return found

    def source(self, name: str) -> ModelSource:
        """Model of a name, as the engine loads it.

        Raises ModelFormatError for a damaged manifest.
        """
        manifest = self.read(name)
        adapters = tuple((self.folder / file, 1.0) for file in manifest.adapters)
        return ModelSource(
            name, self.folder / manifest.files[0], adapters=adapters, preset=manifest.preset, is_fixed=False
        )

    def has(self, name: str) -> bool:
        """True for a model of the catalogue."""
        with contextlib.suppress(InvalidRequestError):
            return self._path(name).is_file()
        return False

    def read(self, name: str) -> Manifest:
        """Manifest of a model.

        Raises ModelFormatError if it is damaged, or a file of it is not there.
        """
        path = self._path(name)
        try:
            data = json.loads(path.read_bytes())
            preset = {**data["preset"], "stop": tuple(data["preset"]["stop"])}
            manifest = Manifest(data["files"], data["adapters"], Preset(**preset))
            files = [self._inside(file) for file in (*manifest.files, *manifest.adapters)]
        except (ValueError, KeyError, TypeError, InvalidRequestError) as error:
            raise ModelFormatError(f"{path}: not a manifest: {error}") from None
        gone = next((file for file in files if not file.is_file()), None)
        if gone is not None or not manifest.files:
            raise ModelFormatError(f"{path}: {gone or 'the model'} is not there")
        return manifest

    def write(self, name: str, manifest: Manifest) -> None:
        """Add a model, or replace it. Raises OSError."""
        with self._lock:
            before = self._files(name)
            with replacing(self._path(name), overwrite=True) as file:
                file.write(json.dumps(attrs.asdict(manifest), indent=1).encode())
            self.drop(before)

    def copy(self, source: str, name: str) -> None:
        """Give a model another name besides. Raises OSError, ModelFormatError."""
        with self._lock:
            self.write(name, self.read(source))

    def delete(self, name: str) -> None:
        """Delete a model, and its files unless others have them.

        Raises OSError.
        """
        with self._lock:
            files = self._files(name)
            self._path(name).unlink()
            self.drop(files)

    @contextlib.contextmanager
    def claimed(self, name: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Keep others from changing a name meanwhile.

        While another does, `waiting` is called until that has ended. Raises InvalidRequestError without it.
        """
        checked_name(name)
        with self._freed:
            while name in self._busy:
                if waiting is None:
                    raise InvalidRequestError(f"{name} is being changed by another request")
                waiting()
                self._freed.wait(_LOOK_S)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._freed:
                self._busy.discard(name)
                self._freed.notify_all()

    # --- files

    def blob(self, digest: str) -> Path:
        """Path of a file by its digest, such as sha256:0123....

        Raises InvalidRequestError for another form.
        """
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise InvalidRequestError(f"{digest!a} is not a digest: sha256: and 64 hexadecimal digits")
        return self.folder / "blobs" / f"sha256-{found[1]}"

    def relative(self, path: Path) -> str:
        """Path of a file as manifests have it."""
        return path.relative_to(self.folder).as_posix()

    @contextlib.contextmanager
    def new_blob(self, digest: str | None = None) -> Iterator[NewBlob]:
        """File to be written, which has its place by its digest.

        `digest` is the one expected, None for any.
        An exception removes it. Raises InvalidRequestError for another digest, OSError.
        """
        folder = self.folder / "blobs"
        with _temporary(folder) as path:
            blob = NewBlob(path)
            yield blob
            found = blob.digest or _digest_of(path)
            if digest is not None and self.blob(digest) != self.blob(found):
                raise InvalidRequestError(f"the file has the digest {found}, not {digest}")
            blob.path = self.blob(found)
            path.replace(blob.path)

    def drop(self, files: Sequence[str]) -> None:
        """Remove files that no manifest has any more."""
        with self._lock:
            kept = {file for name in self.names() for file in self._files(name)}
        for file in set(files) - kept:
            path = self._inside(file)
            target = path.resolve()  # a file of the hub is a link to its contents
            path.unlink(missing_ok=True)
            if target.is_relative_to(self.folder.resolve()):
                target.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / "manifests" / f"{quote(checked_name(name), safe='')}.json"

    def _inside(self, file: str) -> Path:
        """Path of a file of a manifest.

        Raises InvalidRequestError unless it is inside of the folder.
        """
        path = self.folder / file
        if not isinstance(file, str) or ".." in Path(file).parts or not path.is_relative_to(self.folder):
            raise InvalidRequestError(f"{file!a} is not inside of the catalogue")
        return path

    def _files(self, name: str) -> list[str]:
        """Files of a model, none if its manifest is damaged."""
        with contextlib.suppress(ModelFormatError, OSError):
            manifest = self.read(name)
            return [*manifest.files, *manifest.adapters]
        return []


@attrs.define
class NewBlob:
    """File that is being written at `path`.

    `digest` is that of what was written, "" if it is not known.
    """

    path: Path
    digest: str = ""


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".new-")
    open(descriptor, "rb").close()
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def checked_name(name: str) -> str:
    """Name of a model without `:latest`.

    Raises InvalidRequestError for one that could be a path.
    """
    short = name.removesuffix(":latest")
    if len(short) > _MAX_NAME or not _NAME.fullmatch(short):
        raise InvalidRequestError(f"{name[:_MAX_NAME]!a} is not a name of a model, such as family:8b or user/model")
    return short


def expect_gguf(path: Path) -> None:
    """Check that a file is a GGUF file with tensors. Raises ModelFormatError."""
    with open_gguf(path) as file:
        if not file.tensors:
            raise ModelFormatError("it has no tensors")


# --- Modelfiles

_VALUE = r'"""(.*?)"""|"([^"\n]*)"|((?!""")[^\n]*)'
_INSTRUCTION = re.compile(rf"\s*(?:#[^\n]*|(\w+)[ \t]+(?:{_VALUE}))?(?:\n|$)", re.DOTALL)
_PARAMETER = re.compile(r"(\w+)\s+(.*)", re.DOTALL)


def parse_modelfile(text: str) -> dict[str, Any]:
    """Fields of `/api/create` for the text of a Modelfile.

    Raises InvalidRequestError for an unknown instruction, and for a file without FROM or with two.
    """
    fields: dict[str, Any] = {"parameters": {}, "adapters": []}
    position = 0
    while position < len(text):
        found = _INSTRUCTION.match(text, position)
        if found is None:
            line = text[position:].strip().partition("\n")[0]
            raise InvalidRequestError(f"modelfile: {line[:80]!a} is not an instruction")
        position = found.end() if found.end() > position else len(text)
        if found[1] is None:
            continue
        name, value = found[1].upper(), next(part for part in found.groups()[1:] if part is not None).strip()
        if name in ("FROM", "SYSTEM", "TEMPLATE", "LICENSE"):
            if name == "FROM" and "from" in fields:
                raise InvalidRequestError("modelfile: it has a second FROM")
            fields[name.lower()] = value
        elif name == "ADAPTER":
            fields["adapters"].append(value)
        elif name == "PARAMETER" and (pair := _PARAMETER.fullmatch(value)):
            _add_parameter(fields["parameters"], pair[1].lower(), pair[2].strip().strip('"'))
        else:
            raise InvalidRequestError(f"modelfile: {name} is not supported")
    if not fields.get("from"):
        raise InvalidRequestError("modelfile: it has no FROM")
    return fields


def _add_parameter(parameters: dict[str, Any], name: str, value: str) -> None:
    if name == "stop":
        parameters.setdefault("stop", []).append(value)
        return
    try:
        parameters[name] = json.loads(value)
    except ValueError:
        raise InvalidRequestError(f"modelfile: PARAMETER {name} {value[:80]!a} is not a number") from None

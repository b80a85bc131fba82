"""Download and cache of GGUF models from the Hugging Face hub.

Needs `huggingface_hub` and shares its cache with other tools. Its environment variables apply:
HF_HOME and HF_HUB_CACHE for the cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import contextlib
import functools
import importlib
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from llamacli.errors import HubError, InvalidRequestError
from llamacli.util.files import NO_ROOM
from llamacli.util.system import available_memory, fits

_log = logging.getLogger(__name__)

_MIN_VERSION = (2, 4)
"""The first version of huggingface_hub that can delete single files from its cache."""

_PREFERRED = ("Q4_K_M", "Q8_0")
"""Preferred types if several files match and none is requested."""

_REFERENCE = re.compile(
    r"(?:https?://)?(?:(?:hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?", re.ASCII
)
_MODEL = re.compile(r"(?P<stem>.+?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.gguf", re.IGNORECASE)
_OTHER_FILES = ("mmproj", "imatrix")
_ENCODERS = ("F16", "BF16", "Q8_0", "F32")
"""Preferred types of encoders of pictures, the best first."""

_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|B?F16|F32))$", re.IGNORECASE)


@attrs.frozen
class Reference:
    """Name of a hub model.

    `repo` is `user/name`; `quant`, a type such as `Q4_K_M` or None, selects a file.
    """

    repo: str
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse `user/repo[:quant]`, also as an address at hf.co. Raises InvalidRequestError."""
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise InvalidRequestError(f"{text!r} is not a model of the hub: expected user/repo or user/repo:quant")
        return cls(found["repo"], found["quant"])

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def choose(files: Iterable[str], quant: str | None) -> list[str]:
    """Select the files of a model from paths in a repository.

    Of a split model these are all parts, in order. Returns an empty list if no file matches.
    """
    models = {file: found for file in sorted(files) if (found := _model(file)) and int(found["number"] or 1) == 1}
    for wanted in (quant,) if quant else _PREFERRED:
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-./]|$)", re.IGNORECASE)
        first = next((file for file in models if pattern.search(file)), None)
        if first is not None:
            return _shards(first, models[first])
    return [] if quant or not models else _shards(*next(iter(models.items())))


def choose_encoder(files: Iterable[str], model: str) -> str | None:
    """Select a model's encoder of pictures from paths in a repository.

    It is the mmproj file whose folder is nearest to the model's, of several that of the best type. None without one.
    """

    def rank(file: str) -> tuple[int, int, str]:
        found = _QUANT.search(re.sub(r"[-._]?mmproj[-._]?", "-", file[:-5], flags=re.IGNORECASE).rstrip("-"))
        kind = found[1].upper() if found else ""
        return -file.count("/"), _ENCODERS.index(kind) if kind in _ENCODERS else len(_ENCODERS), file

    folders = [model.split("/")[:n] for n in range(model.count("/") + 1)]
    found = [file for file in files if is_encoder(file) and file.split("/")[:-1] in folders]
    return min(found, key=rank, default=None)


def is_encoder(file: str) -> bool:
    """True for the name of a mmproj file."""
    return _is_gguf(file) and "mmproj" in file.rpartition("/")[2].lower()


def _model(file: str) -> re.Match[str] | None:
    return None if any(part in file.rpartition("/")[2].lower() for part in _OTHER_FILES) else _MODEL.fullmatch(file)


def _shards(file: str, found: re.Match[str]) -> list[str]:
    if found["count"] is None:
        return [file]
    count = int(found["count"])
    return [f"{found['stem']}-{number + 1:05}-of-{count:05}{file[-5:]}" for number in range(count)]


def _quant_of(file: str) -> str | None:
    found = _model(file)
    quant = found and _QUANT.search(found["stem"])
    return quant[1].upper() if quant else None


# --- the cache -------------------------------------------------------------------------------------------------------


@attrs.frozen
class CachedModel:
    """A cached model.

    `path` is its first file, `n_bytes` and `modified` are the size and the last modification of all its files.
    """

    reference: Reference
    path: Path
    n_bytes: int
    modified: float


def cached(reference: Reference) -> Path | None:
    """Path of the newest complete cached revision's first file, or None."""
    folder = _folder(reference.repo)
    head = folder / "refs" / "main"
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda snapshot: snapshot.stat().st_mtime, reverse=True)
    with contextlib.suppress(OSError):
        newest = folder / "snapshots" / head.read_text().strip()
        snapshots.sort(key=lambda snapshot: snapshot != newest)
    for snapshot in snapshots:
        files = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.is_file()}
        chosen = choose(files, reference.quant)
        if chosen and files.issuperset(chosen):
            return snapshot / chosen[0]
    return None


def cached_models() -> list[CachedModel]:
    """List the cached models, sorted by name."""
    models = {}
    for repo in _scan().repos:
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
            files = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
            for name in files:
                found = _model(name)
                if repo.repo_type != "model" or found is None or int(found["number"] or 1) != 1:
                    continue
                parts = [files[part] for part in _shards(name, found) if part in files]
                models[repo.repo_id, name] = CachedModel(
                    Reference(repo.repo_id, _quant_of(name)),
                    files[name].file_path,
                    sum(part.size_on_disk for part in parts),
                    max(part.blob_last_modified for part in parts),
                )
    return [models[key] for key in sorted(models)]


def remove(reference: Reference) -> int:
    """Delete a model's files from all cached revisions; returns the bytes freed.

    Without a quant these are all GGUF files of the repository; a repository without files is deleted as well. Raises
    HubError if no file matches.
    """
    cache = _scan()
    repos = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == reference.repo]
    deleted = []
    for revision in (revision for repo in repos for revision in repo.revisions):
        files = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
        names = choose(files, reference.quant) if reference.quant else [name for name in files if _is_gguf(name)]
        if not any(_model(name) for name in files.keys() - set(names)):
            names = [*names, *filter(is_encoder, files)]  # the last model takes the encoder along
        deleted += [files[name] for name in names if name in files]
    if not deleted:
        raise HubError(f"{reference} is not in the cache, {_constants().HF_HUB_CACHE}")
    strategy = cache.delete_files(*deleted)
    strategy.execute()
    kept = {file for repo in repos for revision in repo.revisions for file in revision.files} - set(deleted)
    if not kept:
        shutil.rmtree(repos[0].repo_path, ignore_errors=True)
    return int(strategy.expected_freed_size)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _folder(repo: str) -> Path:
    return Path(_constants().HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _scan() -> Any:
    library, cache = _library(), Path(_constants().HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    return library.scan_cache_dir(cache)


# --- the hub ---------------------------------------------------------------------------------------------------------


def fetch(
    reference: Reference, folder: Path | None = None, progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Download the missing files of a model's newest revision.

    Its encoder of pictures is one of them. Returns the paths of its files, in the cache or, laid out as it is, in
    `folder`; that of the encoder is the last.
    `progress` is called with the name of a file, the bytes of it that are there, and those of the whole file; an
    exception that it raises ends the download. Without it progress bars are shown on a terminal. Raises HubError if the
    hub cannot be reached, the repository or file does not exist, or access needs a token.
    """
    library = _library()
    utils = importlib.import_module("huggingface_hub.utils")
    utils.logging.set_verbosity_error()  # its warnings, such as retries, either become errors or do not matter
    with _hub_errors(reference):
        siblings = library.HfApi().model_info(reference.repo, files_metadata=True).siblings or ()
    names = [sibling.rfilename for sibling in siblings]
    files = choose(names, reference.quant)
    if reference.quant is None:
        files = _fitting(files, {one.rfilename: one.size for one in siblings if getattr(one, "size", None)})
    if not files or not set(files) <= set(names):
        raise HubError(f"{reference}: {_offer(names)}")
    encoder = choose_encoder(names, files[0])
    files += [encoder] if encoder else []
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    paths = []
    with _hub_errors(reference):
        for file in files:
            bars = {} if progress is None else {"tqdm_class": _reporting(functools.partial(progress, file))}
            paths.append(Path(library.hf_hub_download(reference.repo, file, cache_dir=folder, **bars)))
    return paths


def declared(reference: Reference) -> str | None:
    """Architecture of a model at the hub, without its files.

    That of its GGUF files, else the class in its config.json, else None. Raises HubError as `fetch`.
    """
    with _hub_errors(reference):
        info = _library().HfApi().model_info(reference.repo, expand=["gguf", "config"])
    found = (getattr(info, "gguf", None) or {}).get("architecture")
    classes = (getattr(info, "config", None) or {}).get("architectures") or [None]
    return str(found or classes[0]) if found or classes[0] else None


def _fitting(files: list[str], sizes: Mapping[str, int]) -> list[str]:
    """Files of the usual type, or of a smaller one that fits.

    It is the largest that fits the free memory; a warning names it.
    """

    def size(model: Sequence[str]) -> int:
        return sum(sizes.get(file, 0) for file in model)

    free = available_memory()
    if free is None or fits(size(files), free):
        return files
    others = [_shards(file, found) for file in sizes if (found := _model(file)) and int(found["number"] or 1) == 1]
    smaller = [other for other in others if size(other) < size(files) and fits(size(other), free)]
    chosen = max(smaller, key=size, default=files)
    if chosen != files:
        told = f"{_quant_of(files[0])} does not fit the free memory"
        _log.warning("%s: %s of %.1f GiB is taken", told, _quant_of(chosen[0]), size(chosen) / (1 << 30))
    return chosen


def _reporting(progress: Callable[[int, int], None]) -> type:
    class Reporting(contextlib.AbstractContextManager["Reporting"]):
        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any):
            self.total, self.n = total, initial
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            progress(self.n, int(self.total or 0))

        def close(self) -> None:
            """Do nothing."""

        def __exit__(self, *_: object) -> None:
            self.close()

    return Reporting


def _offer(names: Sequence[str]) -> str:
    quants = sorted({quant for name in names if _is_gguf(name) and (quant := _quant_of(name))})
    if quants:
        return f"no matching file; available are {', '.join(quants)}"
    found = [name for name in names if _is_gguf(name)]
    return f"no matching file; available are {', '.join(found)}" if found else "the repository has no GGUF files"


@contextlib.contextmanager
def _hub_errors(reference: Reference) -> Iterator[None]:
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(f"{reference}: request access on its page at the hub, then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"{reference}: no such repository on the hub, or it is private: set HF_TOKEN") from None
    except errors.OfflineModeIsEnabled:
        raise HubError(f"{reference} is not in the cache, and HF_HUB_OFFLINE is set: unset it to download") from None
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        if isinstance(error, OSError) and (error.filename is not None or error.errno in NO_ROOM):
            raise
        first = str(error).strip().splitlines() or [type(error).__name__]
        unreachable = isinstance(error, OSError) or type(error).__name__ in _UNREACHABLE
        remedy = " (is there a network? cached models need none)" if unreachable else ""
        raise HubError(f"{reference}: the hub request failed: {first[0]}{remedy}") from error


_UNREACHABLE = ("ConnectError", "ConnectTimeout", "ReadTimeout")


def _library() -> Any:
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        raise HubError("models of the hub need huggingface_hub: pip install huggingface_hub") from None
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if version < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise HubError(
            f"huggingface_hub {library.__version__} is too old, {needed} is needed: pip install -U huggingface_hub"
        )
    return library


def _constants() -> Any:
    _library()
    return importlib.import_module("huggingface_hub.constants")

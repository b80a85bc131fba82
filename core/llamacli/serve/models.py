"""Models of the server: their files, and what is loaded of them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from llamacli.conversion import FILE_TYPE_NAMES
from llamacli.engine.heads import Head, nextn_head
from llamacli.errors import InvalidRequestError, LlamaCliError, ModelFormatError
from llamacli.generation.drafters import MTP, PromptLookup, drafter_of
from llamacli.loaders import open_model_file
from llamacli.media.encoder import LoadedEncoder
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.model import Model, load_model
from llamacli.plugins import installed_plugins
from llamacli.serve.checks import expect_adapters
from llamacli.serve.drafts import DraftSource
from llamacli.serve.metrics import Counters, LoadStats
from llamacli.serve.requests import AdapterInfo, AdapterScales, ModelInfo, ModelStatus
from llamacli.serve.requests import ModelSource as ModelSource
from llamacli.serve.sampling_pool import SamplingPool
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from llamacli.tools.embedding import Pooler, Pooling

Load = Callable[..., Model]

_log = logging.getLogger(__name__)

_LEAST_CACHE = 64 << 20
_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)


@attrs.define(eq=False)
class LoadedModel:
    """Model in memory, with its scheduler.

    `info` describes it. `used` are the seconds that its steps have taken, by which models take turns. `draft` is its
    draft model or head. `n_bytes` is the memory of its weights, and of its cache when that is full.
    """

    model: Model
    scheduler: Scheduler
    info: ModelInfo
    used: float = 0.0
    draft: Model | Head | None = None
    n_bytes: int = 0

    def close(self) -> None:
        """Free the cache and the models."""
        self.scheduler.close()
        self.model.close()
        if self.draft is not None:
            self.draft.close()


@attrs.define(eq=False)
class Entry:
    """Model that the server has, loaded or not.

    - `loading`: the load that is under way, None if none is.
    - `touched_at`: time of its last use. `n_pins`: calls that need it loaded, or wait for that.
    - `loaded_at`: time of its last load. `waits_since`: time from which a load has waited for room, None if none does.
    - `keep_alive`: seconds without use after which it is unloaded, None for those of its source or of the settings.
    - `sleeps`: it was unloaded because nobody used it. `failure`: the error of its last load, "" if that succeeded.
    - `has_lost`: it was unloaded because a pipeline stage was lost, and is loaded again.
    - `n_loads`, `n_failures`: loads that succeeded and failed.
    - `adapters`: its LoRA adapters, with the scales of now.
    - `removed`: it is no longer offered, and goes once it is idle.
    - `counters`: numbers of all its loads, None before the first.
    """

    source: ModelSource
    loaded: LoadedModel | None = None
    loading: Future[LoadedModel] | None = None
    touched_at: float = 0.0
    loaded_at: float = 0.0
    waits_since: float | None = None
    n_pins: int = 0
    removed: bool = False
    keep_alive: float | None = None
    sleeps: bool = False
    has_lost: bool = False
    failure: str = ""
    n_loads: int = 0
    n_failures: int = 0
    counters: Counters | None = None
    adapters: tuple[AdapterInfo, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        files = enumerate(self.source.adapters)
        self.adapters = tuple(AdapterInfo(number, str(path), scale) for number, (path, scale) in files)

    @property
    def in_use(self) -> bool:
        """True if the model must stay loaded."""
        return self.n_pins > 0 or (self.loaded is not None and self.loaded.scheduler.busy)

    @property
    def is_fixed(self) -> bool:
        """True for a model of the server's start."""
        return self.source.is_fixed

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        if self.loaded:
            info = self.loaded.info
        else:
            status: ModelStatus = "loading" if self.loading else "sleeping" if self.sleeps else "unloaded"
            info = attrs.evolve(unloaded_info(self.source), status=status, failure=self.failure)
        return attrs.evolve(info, adapters=self.adapters) if self.adapters else info

    @property
    def load_stats(self) -> LoadStats:
        """Numbers of its loads."""
        return LoadStats(self.n_loads, self.n_failures, self.loaded.n_bytes if self.loaded else 0)

    def idle_limit(self, default: float | None) -> float:
        """Seconds without use after which the model is unloaded, infinity for never."""
        given = (self.keep_alive, self.source.keep_alive, default)
        limit = next((seconds for seconds in given if seconds is not None), math.inf)
        return math.inf if limit < 0 or self.source.pinned else limit

    def set_adapters(self, scales: AdapterScales) -> None:
        """Set the scales of adapters; those that are not listed get 0.

        Raises InvalidRequestError for an unknown id.
        """
        given = dict(scales)
        expect_adapters(given, len(self.adapters))
        self.adapters = tuple(attrs.evolve(one, scale=given.get(one.id, 0.0)) for one in self.adapters)


def unloaded_info(source: ModelSource) -> ModelInfo:
    """Description of a model that is not loaded, from its file."""
    try:
        status = source.path.stat()
        created, n_bytes = int(status.st_mtime), status.st_size
    except OSError:
        created = n_bytes = 0
    return ModelInfo(
        name=source.name,
        path=str(source.path),
        status="unloaded",
        created=created,
        aliases=source.aliases,
        n_bytes=n_bytes,
        preset=source.preset,
        tags=source.tags,
    )


def weight_bytes(source: ModelSource) -> int:
    """Bytes of a model's files: weights, adapters, draft model and encoder.

    Files that are not there count nothing; their load says so.
    """
    more = [source.draft if isinstance(source.draft, Path) else None, source.mmproj]
    files = [source.path, *(path for path, _ in source.adapters), *filter(None, more)]
    return sum(size for file in files for size in _sizes(file))


def _sizes(path: Path) -> Iterable[int]:
    found = _PART.fullmatch(path.name)
    if path.is_dir():
        parts = [*path.glob("*.safetensors")]
    elif found is not None:
        parts = [path.with_name(f"{found[1]}-{n + 1:05}-of-{found[2]}.gguf") for n in range(int(found[2]))]
    else:
        parts = [path]
    return (part.stat().st_size for part in parts if part.is_file())


def own_settings(source: ModelSource, settings: EngineSettings) -> EngineSettings:
    """Settings with those of a model, and the memory of its cache.

    With a limit of the memory of models a cache has half the bytes of the weights, at least 64 MiB, unless it is given.
    """
    default = None if settings.models_memory is None else max(_LEAST_CACHE, weight_bytes(source) // 2)
    return attrs.evolve(
        settings,
        n_ctx=source.n_ctx or settings.n_ctx,
        kv_memory=source.kv_memory or settings.kv_memory,
        kv_default=default,
    )


def load(
    source: ModelSource,
    settings: EngineSettings,
    load: Load = load_model,
    sampling: SamplingPool | None = None,
    counters: Counters | None = None,
) -> LoadedModel:
    """Load a model and make its scheduler, which goes on with `counters`.

    Raises what `load_model` raises, and InvalidRequestError for a draft model that does not fit.
    """
    settings, n_weights = own_settings(source, settings), weight_bytes(source)
    with contextlib.ExitStack() as opened:
        given: dict[str, Any] = {
            "load": settings.load_mode, "overrides": settings.overrides, "prompts": settings.prompts,
        }  # fmt: skip
        if source.mmproj is not None:
            given["mmproj"] = source.mmproj
        if settings.workers is not None:
            given |= {"load": "auto", "engine": settings.workers.engine(settings.threads, settings.load_mode)}
        model = load(source.path, settings.mode, threads=settings.threads, **given)
        opened.callback(model.close)
        encoder = find_encoder(model)
        draft = None
        if isinstance(source.draft, Path):
            draft = model.load_draft(source.draft, settings.mode, threads=settings.threads)
            opened.callback(draft.close)
        scheduler = Scheduler(
            model,
            settings,
            pooling=_pooler(model, settings.pooling),
            sampling=sampling,
            adapters=[model.load_adapter(path) for path, _ in source.adapters],
            drafts=_draft_source(model, nextn_head(model) if source.draft == MTP else draft, settings),
            encoder=None if encoder is None else model.media_encoder,
            counters=counters,
        )
        n_bytes = n_weights + scheduler.memory.max_bytes
        loaded = LoadedModel(model, scheduler, _info(source, model, scheduler), draft=draft, n_bytes=n_bytes)
        opened.pop_all()
        return loaded


def find_encoder(model: Model) -> LoadedEncoder | None:
    """Encoder of pictures or sound of a model, None without one.

    A file beside the model that cannot be used is a warning, because nobody has named it.
    """
    try:
        return model.find_media_encoder()
    except (LlamaCliError, OSError) as error:
        _log.warning("the model %r reads no pictures or sound: %s", model.name, error)
        return None


def _draft_source(model: Model, draft: Model | Head | None, settings: EngineSettings) -> DraftSource | None:
    """Maker of drafters: draft head, draft model, prompt lookup, or None.

    Raises InvalidRequestError for a draft model of another vocabulary.
    """
    if draft is None:
        return DraftSource(PromptLookup) if settings.lookup else None
    create = partial(drafter_of, draft, n_ctx=settings.n_ctx)
    with create() as drafter:
        drafter.begin(model)
    if isinstance(draft, Head):
        return DraftSource(create, reads_prompts=True, pool=draft.pool)
    return DraftSource(create, pool=draft.kv_pool())


def _pooler(model: Model, wanted: Pooling | None) -> Pooler | None:
    """Pooler of a model, with the pooling that the server's options want.

    Without one, files without pooling have the mean. Raises InvalidRequestError for a rank without a head.
    """
    try:
        pooler = Pooler.of(model)
    except ModelFormatError:  # an unknown pooling
        return None
    if wanted is Pooling.RANK and pooler.classifier is None:
        raise InvalidRequestError(f"pooling rank: {model.metadata.source} has no classifier head")
    return attrs.evolve(pooler, default=wanted or (Pooling.MEAN if pooler.default is Pooling.NONE else pooler.default))


def _info(source: ModelSource, model: Model, scheduler: Scheduler) -> ModelInfo:
    config, kv_type = model.config, scheduler.memory.pool.layout.kv_type
    adapters = [adapter.digest for adapter in scheduler.adapters]
    encoder = model.media_encoder() if scheduler.sees else None
    encoded = f" {encoder.identity}" if encoder else ""
    digest = hashlib.sha256(f"{model.identity} {model.variant} {kv_type} {adapters}{encoded}".encode()).hexdigest()
    unloaded = unloaded_info(source)
    return attrs.evolve(
        unloaded,
        n_bytes=unloaded.n_bytes + (Path(encoder.metadata.source).stat().st_size if encoder else 0),
        status="loaded",
        n_ctx=scheduler.memory.n_ctx,
        n_ctx_train=config.context_length,
        n_vocab=config.n_vocab,
        n_embd=config.n_embd,
        n_params=_n_params(source),
        architecture=model.arch,
        file_type=FILE_TYPE_NAMES.get(model.metadata.get_int("general.file_type", -1), ""),
        fingerprint=f"llamacli-{_version()}-{digest[:8]}",
        embeds=scheduler.embeds,
        pooling=None if scheduler.pooling is None else scheduler.pooling.default,
        ranks=scheduler.embeds and model.classifier is not None,
        normalized=model.classifier is not None and model.classifier.softmax,
        labels=tuple(config.labels),
        sees=encoder is not None and encoder.medium is Picture,
        hears=encoder is not None and encoder.medium is Sound,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("llamacli-core")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "0"


def _n_params(source: ModelSource) -> int:
    file = open_model_file(source.path, installed_plugins().loaders())
    try:
        return sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    finally:
        file.close()

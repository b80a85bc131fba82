"""State that the endpoints share: engine, settings, threads, and descriptions of models."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import attrs

from llamacli.errors import LlamaCliError
from llamacli.serve.catalogue import Catalogue
from llamacli.serve.compilers import Compilers
from llamacli.serve.errors import BadRequestError, UnknownModelError
from llamacli.serve.http.exposition import HttpMetrics
from llamacli.serve.http.jobs import Events, Jobs
from llamacli.serve.http.keys import Keys
from llamacli.serve.http.recordings import Recordings
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import Engine, ModelInfo, Stream
from llamacli.serve.store import Store
from llamacli.tools.mcp import McpServers

T = TypeVar("T")
P = ParamSpec("P")


@attrs.define(eq=False)
class Server:
    """Engine, settings and threads of the endpoints.

    `settings` may be replaced, for the requests that follow. `pool` runs short work on texts (templates, tokenizing),
    `long_texts` that on long ones, one at a time, `pictures` fetches and decodes pictures, `compilers` compile grammars
    and schemas, which may take longer.
    `events` are about downloads. `recordings` are streams that clients can come back to. `controlled` are running
    replies that take commands, by owner and request id.
    `props` are the properties of models that were loaded once, with their fingerprints then. `store` keeps files and
    responses of clients, `jobs` runs work that outlives their requests, `keys` are the API keys, `mcp` runs tools of
    local servers.
    """

    engine: Engine
    settings: HttpSettings
    pool: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(2, "llamacli-text"))
    long_texts: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "llamacli-long-text"))
    pictures: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(2, "llamacli-picture"))
    compilers: Compilers = attrs.field(init=False)
    metrics: HttpMetrics = attrs.field(factory=HttpMetrics)
    unknown: set[str] = attrs.field(factory=set)
    props: dict[str, tuple[str, Any]] = attrs.field(factory=dict)
    controlled: dict[tuple[str, str], Stream] = attrs.field(factory=dict)
    events: Events = attrs.field(factory=Events)
    recordings: Recordings = attrs.field(factory=Recordings)
    jobs: Jobs = attrs.field(factory=Jobs)
    catalogue: Catalogue | None = attrs.field(init=False)
    keys: Keys = attrs.field(init=False)
    store: Store = attrs.field(init=False)
    mcp: McpServers = attrs.field(init=False)

    @compilers.default
    def _compilers(self) -> Compilers:
        return Compilers(self.settings.schema_timeout)

    @catalogue.default
    def _catalogue(self) -> Catalogue | None:
        return None if self.settings.catalogue is None else Catalogue(self.settings.catalogue)

    @keys.default
    def _keys(self) -> Keys:
        return Keys(self.settings.api_keys, self.settings.api_key_file)

    @store.default
    def _store(self) -> Store:
        return Store(self.settings.data, self.settings.store_size, self.settings.store_age)

    @mcp.default
    def _mcp(self) -> McpServers:
        return McpServers(self.settings.mcp)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the pool."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    async def reload(self) -> None:
        """Read the sources of models again.

        Those in use go on until they are idle. Raises BadRequestError if they cannot be read, and then nothing changes.
        """
        if self.settings.sources is None:
            return
        try:
            sources = await self.run(self.settings.sources)
        except (LlamaCliError, OSError) as error:
            raise BadRequestError(f"the models cannot be read again: {error}") from error
        self.engine.offer(sources)

    def find_model(self, name: str | None) -> ModelInfo:
        """Model of a name or alias; the first one for no name.

        Raises UnknownModelError.
        """
        models = self.engine.models()
        wanted = (name or "").removesuffix(":latest")
        for info in models:
            if wanted in (info.name, *info.aliases, *(alias.removesuffix(":latest") for alias in info.aliases)):
                return self._described(info)
        if models and (not name or self.settings.any_model):
            return self._described(models[0])
        known = ", ".join(repr(info.name) for info in models)
        raise UnknownModelError(f"the model {name!r} does not exist; the server has {known}")

    def settings_of(self, info: ModelInfo) -> HttpSettings:
        """Settings of the server, with a model's own defaults."""
        settings, preset = self.settings, info.preset
        if preset is None:
            return settings
        return attrs.evolve(
            settings,
            template=preset.template or settings.template,
            sampling={**settings.sampling, **preset.sampling},
            seed=settings.seed if preset.seed is None else preset.seed,
            max_tokens=settings.max_tokens if preset.max_tokens is None else preset.max_tokens,
            system=preset.system,
            stop=preset.stop,
        )

    def _described(self, info: ModelInfo) -> ModelInfo:
        """Add scales of adapters, template and defaults to a fingerprint."""
        scales, template = [scale for _, scale in info.adapter_scales], self.settings.template
        defaults: dict[str, Any] = {**self.settings.sampling, "max_tokens": self.settings.max_tokens}
        if not self.settings.reasoning:
            defaults["reasoning"] = False
        if info.preset is not None:
            defaults["preset"] = info.preset
        changed = [f"{name} {value}" for name, value in sorted(defaults.items()) if value is not None]
        if not any(scales) and template is None and not changed:
            return info
        digest = hashlib.sha256(" ".join([f"{scales} {template}", *changed]).encode()).hexdigest()
        return attrs.evolve(info, fingerprint=f"{info.fingerprint}-{digest[:8]}")

    def close(self) -> None:
        """End the threads, and close the store."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.long_texts.shutdown(wait=False, cancel_futures=True)
        self.pictures.shutdown(wait=False, cancel_futures=True)
        self.compilers.close()
        self.store.close()

"""Plugin manager: finds, loads and isolates plugins, and resolves architectures.

Entry points are loaded here rather than by `pluggy.PluginManager.load_setuptools_entrypoints`: that one raises when a
second name points at the same module, and lets one broken import abort all the others.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from llamacli import hookspecs
from llamacli.errors import PluginError, UnknownArchitectureError
from llamacli.util.settings import KERNEL_API

if TYPE_CHECKING:
    from llamacli.architecture import Architecture
    from llamacli.chat.formats import ChatFormat
    from llamacli.gguf import Metadata
    from llamacli.loaders import Loader
    from llamacli.quantization import QuantFormat
    from llamacli.sampling import SamplerType

ARCHITECTURES = "llamacli.architectures"
GENERAL = "llamacli"

_log = logging.getLogger(__name__)


@attrs.frozen
class PluginInfo:
    """Installed plugin module, as shown by `llamacli plugins`.

    `architectures` are the names that it claims by entry point; `error` is why it could not be loaded, else None.
    """

    module: str
    distribution: str
    version: str
    architectures: tuple[str, ...]
    error: str | None


class Plugins:
    """Installed plugins.

    Nothing is imported before it is needed; each module is loaded at most once.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None):
        if entry_points is None:
            found = importlib.metadata.entry_points()
            entry_points = [*found.select(group=ARCHITECTURES), *found.select(group=GENERAL)]
        self._entry_points = [entry for entry in dict.fromkeys(entry_points) if _names_a_module(entry)]
        self._manager = pluggy.PluginManager("llamacli")
        self._manager.add_hookspecs(hookspecs)
        self._errors: dict[str, PluginError] = {}
        self._architectures: dict[str, Architecture] = {}
        self._loaders: list[Loader] = []
        self._chat_formats: list[ChatFormat] = []
        self._samplers: dict[str, SamplerType] = {}

    @property
    def hook(self) -> pluggy.HookRelay:
        """Hooks of the plugins loaded so far."""
        return self._manager.hook

    def claimed_architectures(self) -> dict[str, list[EntryPoint]]:
        """Entry points by the `general.architecture` that they claim; imports nothing."""
        claims: dict[str, list[EntryPoint]] = {}
        for entry in self._entry_points:
            if entry.group == ARCHITECTURES:
                claims.setdefault(entry.name, []).append(entry)
        return claims

    def load(self, entry: EntryPoint) -> None:
        """Import the entry's module and register its hooks.

        Raises PluginError, the same one every time.
        """
        if entry.module in self._errors:
            raise self._errors[entry.module]
        if self._manager.has_plugin(entry.module):
            return
        try:
            self._register(entry)
        except (Exception, SystemExit) as cause:
            # An error while one plugin loads must not affect the others.
            error = PluginError(f"plugin {_describe(entry)} cannot be loaded: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._errors[entry.module] = error
            if self._manager.has_plugin(entry.module):
                self._manager.unregister(name=entry.module)
            raise error from cause

    def load_group(self, group: str) -> None:
        """Load all plugins of a group.

        One that fails is logged, listed in `infos()` and left out.
        """
        for entry in self._entry_points:
            if entry.group == group and entry.module not in self._errors:
                try:
                    self.load(entry)
                except PluginError as error:
                    _log.warning("%s", error)

    def resolve(self, metadata: Metadata) -> Architecture:
        """Find the architecture that runs a file with this metadata.

        Raises UnknownArchitectureError when no plugin does, PluginError when several claim it or the plugin is broken.
        """
        name = metadata.get_str("general.architecture")
        claimants = self.claimed_architectures().get(name, [])
        if len({entry.module for entry in claimants}) > 1:
            raise PluginError(
                f"architecture {name!r} is claimed by {' and by '.join(map(_describe, claimants))}; uninstall one"
            )
        if claimants:
            self.load(claimants[0])
            if name not in self._architectures:
                raise PluginError(f"plugin {_describe(claimants[0])} claims architecture {name!r} but registers none")
            return self._architectures[name]
        self.load_group(GENERAL)
        self.load_group(ARCHITECTURES)
        if name in self._architectures:
            return self._architectures[name]
        matches = [found for found in self.call_each("match_architecture", metadata=metadata) if found is not None]
        if not matches:
            raise UnknownArchitectureError(f"{metadata.source}: {self._unknown(name)}")
        architecture: Architecture = matches[0]
        return architecture

    def loaders(self) -> list[Loader]:
        """Loaders of the general plugins; registers their tensor types too."""
        self.load_group(GENERAL)
        return list(self._loaders)

    def chat_formats(self) -> list[ChatFormat]:
        """Chat formats of the general plugins and of loaded architectures."""
        self.load_group(GENERAL)
        return list(self._chat_formats)

    def sampler(self, name: str) -> SamplerType | None:
        """Sampler of this name in the general plugins, or None."""
        from llamacli.sampling import simplified

        self.load_group(GENERAL)
        return self._samplers.get(simplified(name))

    def call_each(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook of each plugin loaded so far.

        Returns the results, without those of plugins that fail.
        """
        answers = []
        plugins = self._manager.list_name_plugin()
        for name, plugin in plugins:
            others = [other for _, other in plugins if other is not plugin]
            try:
                answers.append(self._manager.subset_hook_caller(hook, others)(**arguments))
            except Exception as error:
                _log.warning("%s of plugin %s failed: %s: %s", hook, name, type(error).__name__, error)
        return answers

    def infos(self) -> list[PluginInfo]:
        """Load all installed plugin modules and report on each."""
        by_module: dict[str, list[EntryPoint]] = {}
        for entry in self._entry_points:
            by_module.setdefault(entry.module, []).append(entry)
        infos = []
        for module, entries in sorted(by_module.items()):
            try:
                self.load(entries[0])
            except PluginError as failure:
                error: str | None = str(failure)
            else:
                error = None
            claimed = tuple(sorted(entry.name for entry in entries if entry.group == ARCHITECTURES))
            distribution, version = _origin(entries[0])
            infos.append(PluginInfo(module, distribution, version, claimed, error))
        return infos

    def _register(self, entry: EntryPoint) -> None:
        module = entry.load()
        version = getattr(module, "LLAMACLI_API", None)
        if version != hookspecs.API_VERSION:
            raise PluginError(f"it declares LLAMACLI_API = {version!r}; this core has {hookspecs.API_VERSION}")
        kernel_version = getattr(module, "LLAMACLI_KERNEL_API", KERNEL_API)
        if kernel_version != KERNEL_API:
            raise PluginError(f"it declares LLAMACLI_KERNEL_API = {kernel_version!r}; this core has {KERNEL_API}")
        self._manager.register(module, name=entry.module)
        self._manager.check_pending()
        self._collect(module)

    def _collect(self, module: ModuleType) -> None:
        """Run the registration hooks of one module.

        Keep their results only if all succeed.
        """
        from llamacli.architecture import Architecture  # deferred: NumPy is not needed to name what is installed
        from llamacli.chat.formats import ChatFormat
        from llamacli.loaders import Loader
        from llamacli.quantization import FORMATS, QuantFormat

        only = self._manager.subset_hook_caller
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not module]
        architectures: list[Architecture] = []
        loaders: list[Loader] = []
        added: list[QuantFormat] = []
        chat_formats: list[ChatFormat] = []
        samplers: list[SamplerType] = []
        only("register_architectures", others)(register=_collector(architectures, Architecture))
        only("register_loaders", others)(register=_collector(loaders, Loader))
        only("register_quant_formats", others)(register=_collector(added, QuantFormat))
        only("register_chat_formats", others)(register=_collector(chat_formats, ChatFormat))
        only("register_samplers", others)(register=lambda sampler: _collector(samplers, _sampler_type())(sampler))
        formats: dict[int, QuantFormat] = {fmt.type: fmt for fmt in added}
        chat_names = {fmt.name for fmt in self._chat_formats}
        taken = [
            *(str(key) for key, fmt in formats.items() if FORMATS.get(key, fmt) != fmt),
            *(architecture.name for architecture in architectures if architecture.name in self._architectures),
            *(fmt.name for fmt in chat_formats if fmt.name in chat_names),
            *(sampler.name for sampler in samplers if self._is_taken(sampler)),
        ]
        if taken:
            raise PluginError(f"it registers what is registered already: {', '.join(taken)}")
        FORMATS.update(formats)
        self._architectures.update({architecture.name: architecture for architecture in architectures})
        self._loaders += loaders
        self._chat_formats += chat_formats
        self._samplers.update((name, sampler) for sampler in samplers for name in sampler.names)

    def _is_taken(self, sampler: SamplerType) -> bool:
        from llamacli.sampling import BUILT_IN

        taken = {*self._samplers, *(name for kind in BUILT_IN for name in kind.names)}
        return not taken.isdisjoint(sampler.names)

    def _unknown(self, name: str) -> str:
        installed = sorted(self.claimed_architectures()) or ["none"]
        message = f"no installed plugin runs architecture {name!r} (installed: {', '.join(installed)})"
        distribution = known_distribution(name)
        if distribution not in (None, *(_origin(entry)[0] for entry in self._entry_points)):
            return f"{message}; try: pip install {distribution}"
        return f"{message}; docs/plugins.md shows how to write a plugin for it"


def _sampler_type() -> type:
    """Import SamplerType late: only plugins with samplers need that module."""
    from llamacli.sampling import SamplerType

    return SamplerType


def _collector(into: list[Any], kind: type) -> Callable[[Any], None]:
    """Make a `register` function that accepts objects of one type."""

    def register(thing: Any) -> None:
        if not isinstance(thing, kind):
            raise PluginError(f"it registers {thing!r}: `register` takes {kind.__name__} objects")
        into.append(thing)

    return register


def known_distribution(architecture: str) -> str | None:
    """Find the distribution for `architecture` among the core's extras."""
    try:
        extras = importlib.metadata.metadata("llamacli").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    plain = re.sub(r"[^a-z0-9]", "", architecture.lower())
    families = [
        extra
        for extra in extras
        if plain.startswith(extra) and extra not in ("all", "grammar", "test", "testing", "lint")
    ]
    return f"llamacli-{max(families, key=len)}" if families else None


def _names_a_module(entry: EntryPoint) -> bool:
    """Check an entry point, which installers do not."""
    well_formed = EntryPoint.pattern.match(entry.value) is not None
    if not well_formed:
        _log.warning("entry point %s = %r of %s names no module", entry.name, entry.value, _origin(entry)[0])
    return well_formed


def _origin(entry: EntryPoint) -> tuple[str, str]:
    known = entry.dist.metadata.json if entry.dist else {}  # empty too where a distribution has lost its metadata
    return str(known.get("name", "(unknown)")), str(known.get("version", ""))


def _describe(entry: EntryPoint) -> str:
    name, version = _origin(entry)
    return f"{entry.module} (from {name} {version})".replace(" )", ")")


@functools.cache
def installed_plugins() -> Plugins:
    """Plugins of this process, shared by all models."""
    return Plugins()

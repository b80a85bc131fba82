"""Plugin manager: finds, loads and isolates plugins, and resolves architectures.

Entry points are loaded here rather than by `pluggy.PluginManager.load_setuptools_entrypoints`: that one raises when a
second name points at the same module, and lets one broken import abort all the others.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.resources
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import attrs
import pluggy

from llamacli import hookspecs
from llamacli.errors import (
    InvalidRequestError,
    ModelFormatError,
    PluginError,
    PluginWarning,
    UnknownArchitectureError,
    lacks_memory,
    reason_of,
)
from llamacli.util.locking import fork_safe
from llamacli.util.settings import KERNEL_API, KERNEL_API_CHANGE

if TYPE_CHECKING:
    from llamacli.architecture import Architecture
    from llamacli.chat.formats import ChatFormat
    from llamacli.checkpoints import Checkpoint, CheckpointFile, Folder
    from llamacli.gguf import Metadata
    from llamacli.loaders import Loader
    from llamacli.media.encoder import MediaEncoder
    from llamacli.quantization import TensorType
    from llamacli.sampling import SamplerType

ARCHITECTURES = "llamacli.architectures"
MEDIA = "llamacli.media"
CHECKPOINTS = "llamacli.checkpoints"
GENERAL = "llamacli"
GROUPS = (ARCHITECTURES, MEDIA, CHECKPOINTS, GENERAL)

_SLOW_S = 3.0
"""Seconds to load a plugin that are worth a warning."""

_log = logging.getLogger(__name__)


@attrs.frozen
class PluginInfo:
    """Installed plugin module, as shown by `llamacli plugins`.

    `architectures` are the names that it claims by entry point, `brings` the names of all that it registers, by kind;
    `error` is why it cannot be loaded or used, else None.
    """

    module: str
    distribution: str
    version: str
    architectures: tuple[str, ...]
    error: str | None
    brings: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)


@attrs.frozen
class Kind:
    """Kind of object that plugins register.

    `hook` registers objects of the class `type` in `module`, which is imported when a plugin registers the first.
    `names` are those that no two may share; `core` returns the core's table of them, to which `value` of an object is
    added.
    """

    name: str
    hook: str
    module: str
    type: str
    names: Callable[[Any], Iterable[Any]] = lambda thing: (thing.name,)
    core: Callable[[], dict[Any, Any]] = dict
    value: Callable[[Any], Any] = lambda thing: thing

    def check(self, thing: Any) -> None:
        """Raise PluginError for an object of another class."""
        if not isinstance(thing, getattr(importlib.import_module(self.module), self.type)):
            raise PluginError(f"it registers {thing!r}: `register` takes {self.type} objects")


def _samplers() -> dict[Any, Any]:
    from llamacli.sampling import BUILT_IN

    return {name: kind for kind in BUILT_IN for name in kind.names}


def _table(module: str, name: str) -> Callable[[], dict[Any, Any]]:
    return lambda: getattr(importlib.import_module(module), name)


KINDS = (
    Kind("architectures", "register_architectures", "llamacli.architecture", "Architecture"),
    Kind("media encoders", "register_media", "llamacli.media.encoder", "MediaEncoder"),
    Kind(
        "checkpoints", "register_checkpoints", "llamacli.checkpoints", "Checkpoint",
        lambda checkpoint: checkpoint.classes,
    ),
    Kind("loaders", "register_loaders", "llamacli.loaders", "Loader"),
    Kind(
        "tensor types", "register_quant_formats", "llamacli.quantization", "QuantFormat",
        lambda fmt: (fmt.type,), _table("llamacli.quantization", "FORMATS"),
    ),
    Kind("chat formats", "register_chat_formats", "llamacli.chat.formats", "ChatFormat"),
    Kind(
        "samplers", "register_samplers", "llamacli.sampling", "SamplerType",
        lambda sampler: sampler.names, _samplers,
    ),
    Kind(
        "pre-tokenizers", "register_pre_tokenizers", "llamacli.tokenizer.loading", "NamedPreTokenizer",
        core=_table("llamacli.tokenizer.pretokenizers", "PRE_TOKENIZERS"), value=lambda named: named.scheme,
    ),
    Kind(
        "tokenizers", "register_tokenizers", "llamacli.tokenizer.loading", "TokenizerModel",
        core=_table("llamacli.tokenizer.loading", "TOKENIZER_MODELS"), value=lambda model: model.make,
    ),
)  # fmt: skip
"""Kinds of objects that plugins register by hooks named `register_*`."""


_GENERAL_KINDS = ("loaders", "tensor types", "samplers")
"""Kinds that are looked for without a model, or before its architecture is known: in modules of the group GENERAL."""


class Plugins:
    """Installed plugins; a module is loaded once, when it is needed."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None):
        if entry_points is None:
            found = importlib.metadata.entry_points()
            entry_points = [entry for group in GROUPS for entry in found.select(group=group)]
        self._entry_points = [entry for entry in dict.fromkeys(entry_points) if _names_a_module(entry)]
        self._manager = pluggy.PluginManager("llamacli")
        self._manager.add_hookspecs(hookspecs)
        self._errors: dict[str, PluginError] = {}
        self._lock = fork_safe(threading.RLock())  # a plugin may load others
        self._registered: dict[str, dict[str, Any]] = {kind.name: {} for kind in KINDS}
        self._brings: dict[str, dict[str, list[Any]]] = {}

    @classmethod
    def of(cls, *architectures: Architecture, media: Iterable[MediaEncoder] = ()) -> Self:
        """Plugins that have these architectures and encoders only, for tests."""
        plugins = cls([])
        plugins._registered["architectures"] = {architecture.name: architecture for architecture in architectures}
        plugins._registered["media encoders"] = {encoder.name: encoder for encoder in media}
        return plugins

    @property
    def hook(self) -> pluggy.HookRelay:
        """Hooks of the plugins loaded so far."""
        return self._manager.hook

    def claimed_architectures(self, group: str = ARCHITECTURES) -> dict[str, list[EntryPoint]]:
        """Entry points by the `general.architecture` that they claim; imports nothing.

        Those of the group MEDIA by their `clip.projector_type`, of CHECKPOINTS by their `architectures` of config.json.
        """
        claims: dict[str, list[EntryPoint]] = {}
        for entry in self._entry_points:
            if entry.group == group:
                claims.setdefault(entry.name, []).append(entry)
        return claims

    def load(self, entry: EntryPoint) -> None:
        """Import the entry's module, register its hooks; always the same PluginError.

        MemoryError, after which the next call tries again, if there is no memory for it.
        """
        with self._lock:  # models are loaded by several threads
            self._load(entry)

    def _load(self, entry: EntryPoint) -> None:
        if entry.module in self._errors:
            raise self._errors[entry.module]
        if self._manager.has_plugin(entry.module):
            return
        started = time.perf_counter()
        try:
            self._register(entry)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"llamacli was interrupted while plugin {_describe(entry)} was loaded")
            raise
        except BaseException as cause:
            # An error while one plugin loads must not affect the others.
            if self._manager.has_plugin(entry.module):
                self._manager.unregister(name=entry.module)
            if lacks_memory(cause):
                raise MemoryError(f"there is none to load plugin {_describe(entry)}") from cause
            error = PluginError(f"plugin {_describe(entry)} cannot be loaded: {reason_of(cause)}")
            error.__cause__ = cause
            self._errors[entry.module] = error
            raise error from cause
        if (seconds := time.perf_counter() - started) > _SLOW_S:
            warn(f"plugin {_describe(entry)} took {seconds:.1f} seconds to load")

    def load_group(self, group: str) -> None:
        """Load all plugins of a group.

        One that fails is reported as a PluginWarning, listed in `infos()` and left out.
        """
        self._load_all(entry for entry in self._entry_points if entry.group == group)

    def _load_all(self, entries: Iterable[EntryPoint]) -> None:
        for entry in entries:
            if entry.module not in self._errors:
                try:
                    self.load(entry)
                except PluginError as error:
                    warn(str(error))

    def resolve(self, metadata: Metadata) -> Architecture:
        """Find the architecture that runs a file with this metadata.

        Raises UnknownArchitectureError when no plugin does, PluginError when several claim it or the plugin is broken.
        """
        name = metadata.get_str("general.architecture")
        known: dict[str, Architecture] = self._registered["architectures"]
        if claimants := self.claimed_architectures().get(name, []):
            if contest := self._contest(name):
                raise PluginError(contest)
            self.load(claimants[0])
            if name not in known:
                raise PluginError(f"plugin {_describe(claimants[0])} {_unregistered(name)}")
            return known[name]
        self.load_group(GENERAL)
        self.load_group(ARCHITECTURES)
        if name in known:
            return known[name]
        return self._match(metadata)

    def media_encoder(self, projector: str) -> MediaEncoder:
        """Media encoder of a `clip.projector_type`. Raises what `resolve` raises."""
        known: dict[str, MediaEncoder] = self._registered["media encoders"]
        claims = self.claimed_architectures(MEDIA)
        if claimants := claims.get(projector, []):
            if len({entry.module for entry in claimants}) > 1:
                raise PluginError(f"projector {projector!r} is claimed by {' and by '.join(map(_describe, claimants))}")
            self.load(claimants[0])
        if projector not in known:
            installed = ", ".join(sorted({*claims, *known})) or "none"
            raise UnknownArchitectureError(
                f"no installed plugin encodes pictures or sound for clip.projector_type = {projector!r} (installed: "
                f"{installed})"
            )
        return known[projector]

    def layout(self, name: str) -> Checkpoint | None:
        """Layout of folders of a class of transformers, without its variants."""
        known: dict[str, Checkpoint] = self._registered["checkpoints"]
        if claimants := self.claimed_architectures(CHECKPOINTS).get(name, []):
            if len({entry.module for entry in claimants}) > 1:
                raise PluginError(f"checkpoint {name!r} is claimed by {' and by '.join(map(_describe, claimants))}")
            self.load(claimants[0])
        return known.get(name)

    def checkpoint(self, folder: Folder) -> Checkpoint:
        """Layout of a Hugging Face folder. Raises what `resolve` raises."""
        from llamacli.checkpoints.keys import value_of

        found = next((layout for name in folder.classes if (layout := self.layout(name))), None)
        if found is not None:
            if found.variant:
                found = value_of(found.variant, folder.config, f"{folder.path}/config.json")
            return found
        if not folder.has_config:
            raise ModelFormatError(f"{folder.path}: {folder.without_config()}")
        claims = self.claimed_architectures(CHECKPOINTS)
        remote = folder.raw.get("auto_map")
        code = " its own code (auto_map) is not run." if remote else ""
        similar = difflib.get_close_matches(folder.classes[0], claims, 3)
        hint = f" Similar: {', '.join(similar)}." if similar else ""
        raise UnknownArchitectureError(
            f"{folder.path}/config.json: `architectures` is {', '.join(folder.classes)}, which no installed plugin "
            f"reads;{code}{hint} A plugin adds it by register_checkpoints, see docs/hooks/checkpoint.md"
        )

    def architecture(self, name: str) -> Architecture:
        """Architecture of this `general.architecture`, without a file. Raises what `resolve` raises."""
        from llamacli.gguf import Metadata

        return self.resolve(Metadata({"general.architecture": name}, name))

    def loaders(self) -> list[Loader]:
        """Loaders of general plugins and folders; registers their tensor types too."""
        from llamacli.loaders import Loader

        self.load_group(GENERAL)
        found = list(self._registered["loaders"].values())
        if self.claimed_architectures(CHECKPOINTS) or self._registered["checkpoints"]:
            found.append(Loader("Hugging Face folder", Path.is_dir, self.open_folder, folders=True))
        return found

    def open_folder(self, path: Path, kind: TensorType | None = None, base: Path | None = None) -> CheckpointFile:
        """Open a Hugging Face folder, with matrices of this type.

        A draft head needs the folder of its model, the `base`, for its tokenizer. Raises ModelFormatError and what
        `resolve` raises.
        """
        from llamacli.checkpoints import CheckpointFile, Folder

        folder = Folder(path)
        checkpoint = self.checkpoint(folder)
        if checkpoint.is_draft and base is None:
            raise ModelFormatError(
                f"{path}/config.json: {folder.classes[0]} is a draft head: `llamacli convert {path} OUT --base FOLDER` "
                "with the folder of its model makes a file for --draft"
            )
        if base is None:
            return CheckpointFile(folder, checkpoint, kind)
        if not checkpoint.is_draft:
            raise InvalidRequestError(f"--base is for PEFT adapters and draft heads: {path} is {checkpoint.name}")
        model = Folder(base)
        return CheckpointFile(folder, checkpoint, kind, (model, self.checkpoint(model)))

    def chat_formats(self) -> list[ChatFormat]:
        """Chat formats of the general plugins, then of loaded architectures.

        All modules of a distribution share their formats: the others are loaded too.
        """
        self.load_group(GENERAL)
        general = {entry.module for entry in self._entry_points if entry.group == GENERAL}
        sharing = {entry.dist for entry in self._entry_points if entry.dist and entry.module in self._brings}
        self._load_all(entry for entry in self._entry_points if entry.dist in sharing)
        modules = sorted(self._brings, key=lambda module: module not in general)
        return [fmt for module in modules for fmt in self._brings[module]["chat formats"]]

    def sampler(self, name: str) -> SamplerType | None:
        """Sampler of this name in the general plugins, or None."""
        from llamacli.sampling import simplified

        self.load_group(GENERAL)
        return self._registered["samplers"].get(simplified(name))

    def sampler_names(self) -> list[str]:
        """Names of the samplers of the general plugins."""
        self.load_group(GENERAL)
        return sorted({kind.name for kind in self._registered["samplers"].values()})

    def call_each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call a hook of each plugin loaded so far.

        Returns results with the names of the plugins. One that fails is reported as a PluginWarning and left out.
        """
        answers = []
        for name, plugin in self._manager.list_name_plugin():
            try:
                answers.append((name, self._call(plugin, hook, **arguments)))
            except Exception as error:
                warn(f"{hook} of plugin {name} failed: {reason_of(error)}")
        return answers

    def infos(self) -> list[PluginInfo]:
        """Load all installed plugin modules and report on each."""
        by_module: dict[str, list[EntryPoint]] = {}
        for entry in self._entry_points:
            by_module.setdefault(entry.module, []).append(entry)
        infos = []
        for module, entries in sorted(by_module.items()):
            claimed = tuple(sorted(entry.name for entry in entries if entry.group == ARCHITECTURES))
            try:
                self.load(entries[0])
            except PluginError as failure:
                problems = [str(failure)]
            else:
                problems = self._problems(module, claimed)
            distribution, version = _origin(entries[0])
            error = "; ".join(problems) or None
            infos.append(PluginInfo(module, distribution, version, claimed, error, self._names(module)))
        return infos

    def _problems(self, module: str, claimed: Iterable[str]) -> list[str]:
        own = [architecture.name for architecture in self._brings[module]["architectures"]]
        groups = {entry.group for entry in self._entry_points if entry.module == module}
        unreachable = [kind for kind in _GENERAL_KINDS if self._brings[module][kind]] if GENERAL not in groups else []
        contests = [contest for name in claimed if (contest := self._contest(name))]
        return [
            *contests,
            *(f"it {_unregistered(name)}" for name in claimed if name not in own),
            *(
                f"its {kind} are not found: name {module} in the entry-point group {GENERAL!r} too"
                for kind in unreachable
            ),
        ]

    def _names(self, module: str) -> dict[str, tuple[str, ...]]:
        brings = self._brings.get(module, {})
        names = {kind: tuple(str(getattr(thing, "name", thing)) for thing in found) for kind, found in brings.items()}
        return {kind: found for kind, found in names.items() if found}

    def _contest(self, name: str) -> str | None:
        claimants = self.claimed_architectures().get(name, [])
        if len({entry.module for entry in claimants}) < 2:
            return None
        return f"architecture {name!r} is claimed by {' and by '.join(map(_describe, claimants))}; uninstall one"

    def _match(self, metadata: Metadata) -> Architecture:
        from llamacli.architecture import Architecture

        answers = self.call_each("match_architecture", metadata=metadata)
        for plugin, found in answers:
            if isinstance(found, Architecture):
                return found
            if found is not None:
                raise PluginError(
                    f"match_architecture of plugin {plugin} returned {found!r}, expected an Architecture or None"
                )
        name = metadata.get_str("general.architecture")
        raise UnknownArchitectureError(f"{metadata.source}: {self._unknown(name)}")

    def _register(self, entry: EntryPoint) -> None:
        module = entry.load()
        version = getattr(module, "LLAMACLI_API", None)
        if version != hookspecs.API_VERSION:
            raise PluginError(f"it declares LLAMACLI_API = {version!r}; this core has {hookspecs.API_VERSION}")
        kernel_version = getattr(module, "LLAMACLI_KERNEL_API", KERNEL_API)
        if kernel_version != KERNEL_API:
            raise PluginError(
                f"it declares LLAMACLI_KERNEL_API = {kernel_version!r}; this core has {KERNEL_API}: {KERNEL_API_CHANGE}"
            )
        self._manager.register(module, name=entry.module)
        if not self._manager.get_hookcallers(module):
            raise PluginError(f"it implements no hook; decorate its functions with @hookimpl ({', '.join(_HOOKS)})")
        self._check_hooks(module)
        self._collect(module, entry.module)

    def _check_hooks(self, module: ModuleType) -> None:
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            misspelt = [hook.name for hook in self._manager.get_hookcallers(module) or [] if not hook.has_spec()]
            similar = difflib.get_close_matches(misspelt[0], _HOOKS, 1) if misspelt else []
            raise PluginError(f"{error}{f'; did you mean {similar[0]!r}?' if similar else ''}") from error

    def _collect(self, module: ModuleType, name: str) -> None:
        brings: dict[str, list[Any]] = {}
        for kind in KINDS:
            found: list[Any] = []
            self._call(module, kind.hook, register=_collector(found, kind))
            brings[kind.name] = found
        if taken := [text for kind in KINDS for text in self._taken(kind, brings[kind.name], name)]:
            raise PluginError(f"it registers what is registered already: {', '.join(taken)}")
        hooks = {caller.name for caller in self._manager.get_hookcallers(module) or []}
        brings["hooks"] = sorted(hooks - {kind.hook for kind in KINDS})
        for kind in filter(lambda kind: brings[kind.name], KINDS):
            added = {key: thing for thing in brings[kind.name] for key in kind.names(thing)}
            self._registered[kind.name] |= added
            kind.core().update({key: kind.value(thing) for key, thing in added.items()})
        self._brings[name] = brings

    def _call(self, plugin: object, hook: str, **arguments: Any) -> Any:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        caller = self._manager.subset_hook_caller(hook, others)
        if not os.environ.get(TRACE) or not caller.get_hookimpls():
            return caller(**arguments)
        call, start = f"{hook} of {self._manager.get_name(plugin)}({', '.join(arguments)})", time.perf_counter()
        try:
            answer = caller(**arguments)
        except BaseException as error:
            print(f"llamacli: {call} raised {reason_of(error)}", file=sys.stderr)
            raise
        print(f"llamacli: {call} = {answer!r} in {1e3 * (time.perf_counter() - start):.1f} ms", file=sys.stderr)
        return answer

    def _taken(self, kind: Kind, found: list[Any], module: str) -> Iterator[str]:
        core = kind.core() if found else {}
        claims = self.claimed_architectures() if kind.name == "architectures" else {}
        for thing in found:
            claimants = {entry.module: entry for name in kind.names(thing) for entry in claims.get(name, [])}
            if claimants and module not in claimants:
                yield f"{thing.name}, which {_describe(next(iter(claimants.values())))} claims"
            elif any(
                (name in self._registered[kind.name] and len(claimants) < 2)
                or (name in core and core[name] != kind.value(thing))
                for name in kind.names(thing)
            ):
                yield str(thing.name)

    def _unknown(self, name: str) -> str:
        installed = sorted(self.claimed_architectures()) or ["none"]
        message = f"no installed plugin runs architecture {name!r} (installed: {', '.join(installed)})"
        if known := known_architectures().get(name):
            return f"{message}; try: pip install {known['plugin']}"
        return f"{message}; to write a plugin for it: llamacli plugins new NAME --from FILE, see docs/plugins.md"


TRACE = "LLAMACLI_TRACE_PLUGINS"
"""Environment variable: if set, each call of a hook is printed to stderr with its result and time."""

_HOOKS = sorted(name for name, value in vars(hookspecs).items() if hasattr(value, "llamacli_spec"))


def warn(message: str) -> None:
    """Report the failure of a plugin as PluginWarning, and in the log."""
    _log.warning("%s", message)
    warnings.warn(message, PluginWarning, stacklevel=3)


def _collector(into: list[Any], kind: Kind) -> Callable[[Any], None]:
    def register(thing: Any) -> None:
        kind.check(thing)
        into.append(thing)

    return register


def _unregistered(name: str) -> str:
    return f"claims architecture {name!r} but registers none of this name; is @hookimpl missing?"


def known_architectures() -> dict[str, dict[str, str]]:
    """`plugin` and `models` of each architecture of this project's plugins."""
    text = importlib.resources.files("llamacli").joinpath("data/architectures.json").read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def _names_a_module(entry: EntryPoint) -> bool:
    well_formed = EntryPoint.pattern.match(entry.value) is not None
    if not well_formed:
        warn(f"entry point {entry.name} = {entry.value!r} of {_origin(entry)[0]} names no module")
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

"""Memory of loaded models, and eviction of the least recently used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamacli.serve.errors import ModelTooLargeError
from llamacli.serve.models import Entry, own_settings, weight_bytes
from llamacli.serve.settings import EngineSettings

PATIENCE_S = 5.0
"""Seconds that a load waits for idle models, before the one that was loaded first takes no further requests."""

_ASKS_S = 1.0
"""Seconds in which whoever waits for a load asks again."""


def expect_fit(entry: Entry, loaded: Sequence[Entry], settings: EngineSettings) -> None:
    """Check that a model fits beside those that stay loaded.

    Raises ModelTooLargeError with the numbers.
    """
    pinned = [one for one in loaded if one.source.pinned]
    if settings.models_memory is not None:
        needed, kept = _needed(entry, settings), sum(_needed(one, settings) for one in pinned)
        if needed + kept > settings.models_memory:
            beside = f", of which {kept} are those of pinned models" if kept else ""
            raise ModelTooLargeError(
                f"the model {entry.source.name!r} needs {needed} bytes, {weight_bytes(entry.source)} of them for its "
                f"weights, and the server has {settings.models_memory} for models{beside}: see --models-memory and "
                "--kv-memory"
            )
    if settings.models_max is not None and len(pinned) >= settings.models_max:
        raise ModelTooLargeError(f"all {settings.models_max} models that may be loaded at once are pinned")


def has_room(entry: Entry, loaded: Sequence[Entry], settings: EngineSettings) -> bool:
    """True if a model fits beside all that are loaded."""
    if settings.models_max is not None and len(loaded) >= settings.models_max:
        return False
    if settings.models_memory is None:
        return True
    return sum(_needed(one, settings) for one in (entry, *loaded)) <= settings.models_memory


def least_recently_used(loaded: Iterable[Entry]) -> Entry | None:
    """Model to be unloaded, None if all are in use or pinned."""
    idle = [one for one in loaded if not (one.in_use or one.source.pinned)]
    return min(idle, key=lambda one: one.touched_at, default=None)


def gives_way(entry: Entry, entries: Iterable[Entry], now: float) -> bool:
    """True for the model that takes no further requests.

    It is the one that was loaded first, when a load has waited long. Otherwise models that always have requests would
    keep others out.
    """
    listed = list(entries)
    waits = any(
        one.waits_since is not None and now - one.waits_since > PATIENCE_S and now - one.touched_at < _ASKS_S
        for one in listed
    )
    loaded = [one for one in listed if one.loaded and not one.source.pinned]
    return waits and entry is min(loaded, key=lambda one: one.loaded_at, default=None)


def _needed(entry: Entry, settings: EngineSettings) -> int:
    """Bytes of a model, before its load the most it may take."""
    if entry.loaded is not None:
        return entry.loaded.n_bytes
    own = own_settings(entry.source, settings)
    return weight_bytes(entry.source) + (own.kv_memory or own.kv_default or 0)

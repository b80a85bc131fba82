"""Settings of the engine side of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from llamacli.engine.compiled_model import KVTypes
from llamacli.errors import InvalidRequestError
from llamacli.generation.drafters import MAX_DRAFT, checked_max_tokens
from llamacli.kv import N_BATCH
from llamacli.stages.link import WorkerSource
from llamacli.tools.embedding import Pooling
from llamacli.util.system import usable_cores

MOST_RUNNING = 32
"""Texts that run at once at most, unless `--max-running` is given."""

MAX_LOST = 3
"""Replicas or pipeline stages that a request may lose: it may be the reason."""

_FEW_CORES = 4


def default_max_running() -> int:
    """Default number of running sequences: 8, or 32 on many cores."""
    return 8 if usable_cores().threads <= _FEW_CORES else MOST_RUNNING


def _at_least(low: float) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not value >= low:
            raise InvalidRequestError(f"{attribute.name} must be at least {low:g}, not {value!r}")

    return check


def _at_most_a_batch(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 1 <= value <= N_BATCH:
        raise InvalidRequestError(f"{attribute.name} must be from 1 to {N_BATCH}, not {value!r}")


def _length_of_drafts(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    checked_max_tokens(value)


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Limits of the engine.

    Each model has its own queue, cache and running sequences.

    - `n_ctx`: tokens of a context, None for the model's own length, or what the cache's memory holds.
    - `kv_type`: type of cached keys and values, as for `Model.create_session`.
    - `kv_memory`: bytes of a model's cache, with those of its drafters, None for as many as contexts of all sequences
      at once take, up to a share of the memory that is free after loading, and up to `kv_default`, if that is given and
      holds a context of `n_ctx` tokens.
    - `max_running`: sequences that run at once.
    - `extra_running`: further sequences, while a step of all of them takes at most half of `step_ms`.
    - `max_queue`, `max_queue_tokens`: requests that wait, and tokens of their prompts.
    - `max_per_key`: requests of one key that wait or run, None for no limit.
    - `step_ms`: time of a step that running sequences wait for at most, in milliseconds; 0 for the greatest throughput.
    - `max_tokens`: limit of the tokens of a text, None for the rest of the context.
    - `queue_timeout`: seconds after which a waiting request fails.
    - `request_timeout`: seconds after which a text ends with the reason "length", None for no limit.
    - `models_max`: models loaded at once; `models_memory`: bytes of their weights and caches. None for no limit.
    - `idle_unload`: seconds without a request after which a model is unloaded, None for never.
    - `load_timeout`: seconds that a request waits for its model to be loaded.
    - `stuck_after`: seconds without a step, while requests run, after which the engine counts as stuck.
    - `mode`, `prompts`, `threads`: as for `load_model`; `load_mode`: its `load`.
    - `workers`: those that the layers of models are divided among, None for none.
    - `overrides`: keys of the models' metadata that are replaced.
    - `prompt_cache`: folder of prefixes on disk, and its limit in bytes; None for none.
    - `pooling`: pooling of embeddings that replaces that of the models' files.
    - `lookup`: draft tokens by prompt lookup. `draft_max`: maximum length of drafts.
    """

    n_ctx: int | None = attrs.field(default=None, validator=_at_least(1))
    kv_type: KVTypes | None = None
    kv_memory: int | None = attrs.field(default=None, validator=_at_least(1))
    kv_default: int | None = None
    max_running: int = attrs.field(factory=default_max_running, validator=_at_most_a_batch)
    extra_running: int = attrs.field(default=0, validator=_at_least(0))
    max_queue: int = attrs.field(default=64, validator=_at_least(0))
    max_queue_tokens: int = attrs.field(default=65_536, validator=_at_least(0))
    max_per_key: int | None = attrs.field(default=None, validator=_at_least(1))
    step_ms: float = attrs.field(default=150.0, validator=_at_least(0))
    max_tokens: int | None = attrs.field(default=None, validator=_at_least(1))
    queue_timeout: float = attrs.field(default=300.0, validator=_at_least(0))
    request_timeout: float | None = attrs.field(default=None, validator=_at_least(0))
    models_max: int | None = attrs.field(default=None, validator=_at_least(1))
    models_memory: int | None = attrs.field(default=None, validator=_at_least(1))
    idle_unload: float | None = attrs.field(default=None, validator=_at_least(0))
    load_timeout: float = attrs.field(default=120.0, validator=_at_least(0))
    stuck_after: float = attrs.field(default=30.0, validator=_at_least(0))
    mode: str = "auto"
    load_mode: str = "auto"
    prompts: str = "registers"
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    prompt_cache: tuple[str, int] | None = None
    threads: int | None = None
    workers: WorkerSource | None = None
    pooling: Pooling | None = None
    lookup: bool = False
    draft_max: int = attrs.field(default=MAX_DRAFT, validator=_length_of_drafts)

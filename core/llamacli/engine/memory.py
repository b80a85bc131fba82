"""Memory that a model needs, and where its weights go."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs

from llamacli.engine.base import QuantMode
from llamacli.engine.floats import modes_of
from llamacli.engine.weights import packed_bytes
from llamacli.errors import InvalidRequestError, OutOfMemoryError
from llamacli.graph import Graph
from llamacli.kv import KVLayout
from llamacli.loaders import ModelFile
from llamacli.util.settings import LoadMode
from llamacli.util.system import available_memory, fits, memory_capacity

_log = logging.getLogger(__name__)

CONTEXT = 4096
"""Tokens of the context whose cache is counted."""


@attrs.frozen
class Need:
    """Bytes of packed weights, and of the KV cache of CONTEXT tokens."""

    weights: int
    cache: int

    @classmethod
    def of(cls, graph: Graph, file: ModelFile, mode: QuantMode) -> Need:
        """Memory of a graph whose weights are kept in a mode."""
        kv_type = "f32" if mode is QuantMode.FP32 else "f16"
        layout = KVLayout.of(graph.states, kv_type, graph.recurrent, graph.held)
        return cls(packed_bytes(graph, file, modes_of(graph, mode)), layout.n_bytes(CONTEXT))

    @property
    def n_bytes(self) -> int:
        """Bytes of both."""
        return self.weights + self.cache

    def __str__(self) -> str:
        return f"the weights take {_mib(self.weights)} and the cache of {CONTEXT} tokens {_mib(self.cache)}"


def stays_on_disk(load: LoadMode, need: Need, path: Path, *, can_map: bool) -> bool:
    """Decide whether weights stay on disk, where `can_map` allows it.

    They are mapped from a packed copy then. Raises InvalidRequestError for LoadMode.MAP without `can_map`, and
    OutOfMemoryError for what shall be in memory and does not fit: with `can_map` into the free memory, without into all
    that there is. What is not free then may become so, and a warning has the numbers.
    """
    if load is LoadMode.MAP and not can_map:
        reason = "there are none on Windows and with NUMBA_DISABLE_JIT"
        raise InvalidRequestError(f"{path}: load 'map' needs packed copies, and {reason}")
    free = available_memory()
    if load is LoadMode.MAP or free is None or fits(need.n_bytes, free):
        return load is LoadMode.MAP
    capacity = memory_capacity()
    told = f"{path}: {need}, and {_mib(free)}{'' if capacity is None else f' of {_mib(capacity)}'} are free"
    if load is LoadMode.AUTO and can_map:
        _log.warning("%s: the weights are read from disk when they are used", told)
        return True
    if can_map:
        raise OutOfMemoryError(need.n_bytes, free, f"{told}: --load map reads the weights from disk when they are used")
    if capacity is not None and need.weights > capacity:
        raise OutOfMemoryError(need.n_bytes, free, f"{told}; take a smaller quantization or model")
    _log.warning("%s; end other programs, or take a smaller quantization", told)
    return False


def _mib(n_bytes: int) -> str:
    return f"{n_bytes >> 20} MiB"

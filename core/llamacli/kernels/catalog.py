"""Kernels that do not belong to one op: all of them, so that they can be compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llamacli.kernels import activation_rounding, attention, encoding, experts, linear, packing, sampling, team
from llamacli.kernels.jit import ArrayFunction, Compiled, Kernel
from llamacli.kernels.kv_types.types import KV_TYPES, KVType
from llamacli.kernels.registry import kinds

_MODULES = (activation_rounding, attention, encoding, experts, linear, packing, sampling, team)

_CACHES = [KVType(name, name) for name in KV_TYPES]
"""Those of mixed types are compiled when they are asked for."""

_FAMILIES: tuple[tuple[Callable[[Any], Kernel], Callable[[], Iterable[Any]]], ...] = (
    (packing.pack_kernel, kinds),
    (linear.linear, kinds),
    (activation_rounding.round_activations, lambda: activation_rounding.FORMS),
    (attention.store_kv, lambda: _CACHES),
    (attention.attention, lambda: _CACHES),
)
"""Kernels that are made for one thing of a kind each, and what there is of that kind."""


def shared_kernels() -> list[Compiled | ArrayFunction]:
    """All kernels of this package, each once, none compiled by being listed."""
    kinds = (Compiled, ArrayFunction)
    singles = [value for module in _MODULES for value in vars(module).values() if isinstance(value, kinds)]
    made = [make(variant) for make, variants in _FAMILIES for variant in variants()]
    return list({kernel.name: kernel for kernel in (*singles, *made)}.values())

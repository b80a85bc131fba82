"""List of the kernels that ops share.

Used to compile them ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llamacli.kernels import (
    activation_rounding,
    attention,
    codebook_encoding,
    encoding,
    experts,
    linear,
    low_rank,
    packing,
    sampling,
    team,
)
from llamacli.kernels.jit import Compiled, Kernel
from llamacli.kernels.kv_types.types import KV_TYPES, KVType
from llamacli.kernels.registry import kinds

_MODULES = (
    activation_rounding,
    attention,
    codebook_encoding,
    encoding,
    experts,
    linear,
    low_rank,
    packing,
    sampling,
    team,
)

_CACHES = [KVType(name, name) for name in KV_TYPES]
"""Cache types compiled ahead of time; mixed pairs are compiled when they are first used."""

_FAMILIES: tuple[tuple[Callable[[Any], Kernel], Callable[[], Iterable[Any]]], ...] = (
    (packing.pack_kernel, kinds),
    (linear.linear, kinds),
    (activation_rounding.round_activations, lambda: activation_rounding.FORMS),
    (attention.store_kv, lambda: _CACHES),
    (attention.attention, lambda: _CACHES),
    (attention.latent_attention, lambda: _CACHES),
)
"""Functions that make a kernel for a variant, and functions that list the variants."""


def shared_kernels() -> list[Compiled]:
    """List the kernels of this package, each once, without compiling any."""
    singles = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Compiled)]
    made = [make(variant) for make, variants in _FAMILIES for variant in variants()]
    return list({kernel.name: kernel for kernel in (*singles, *made)}.values())

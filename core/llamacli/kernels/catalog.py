"""List of the kernels that ops share.

Used to compile them ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from llamacli.kernels import (
    activation_rounding,
    attention,
    codebook_encoding,
    embedding,
    encoding,
    experts,
    faults,
    linear,
    linear_state,
    low_rank,
    packing,
    sampling,
    team,
)
from llamacli.kernels.isa import isa
from llamacli.kernels.jit import Compiled, Kernel
from llamacli.kernels.kv_types.types import KV_TYPES, KVType
from llamacli.kernels.registry import integer_kinds, kinds

_MODULES = (
    activation_rounding,
    attention,
    codebook_encoding,
    encoding,
    experts,
    faults,
    linear,
    low_rank,
    packing,
    sampling,
    team,
)

_OF_KEYS, _OF_VALUES = ("f16", "q8_0"), ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_PAIRS = [*zip(KV_TYPES, KV_TYPES, strict=True), *product(_OF_KEYS, _OF_VALUES)]
CACHES = [KVType(k, v) for k, v in dict.fromkeys(_PAIRS)]
"""Cache types compiled ahead of time; other pairs are compiled when they are first used."""

_FAMILIES: tuple[tuple[Callable[[Any], Kernel], Callable[[], Iterable[Any]]], ...] = (
    (packing.pack_kernel, kinds),
    (linear.linear, kinds),
    (linear.tiled_linear, lambda: integer_kinds() if isa() == "amx" else []),
    (embedding.embedding, kinds),
    (activation_rounding.round_activations, lambda: activation_rounding.FORMS),
    (attention.store_kv, lambda: CACHES),
    (attention.attention, lambda: CACHES),
    (attention.tiled_attention, lambda: CACHES if isa() == "amx" else []),
    (attention.latent_attention, lambda: [kv_type for kv_type in CACHES if kv_type.k == kv_type.v]),
    (linear_state.linear_state, lambda: linear_state.STATE_FORMS),
)
"""Functions that make a kernel for a variant, and functions that list the variants."""


def shared_kernels() -> list[Compiled]:
    """List the kernels of this package, each once, without compiling any."""
    singles = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Compiled)]
    made = [make(variant) for make, variants in _FAMILIES for variant in variants()]
    return list({kernel.name: kernel for kernel in (*singles, *made)}.values())

"""Registry of tensor types that have kernels.

The core's, and those whose packing a plugin describes. A plugin's description comes with its `QuantFormat`, so this
module does not depend on plugins.
"""

from __future__ import annotations

import functools
import logging
import re
from enum import IntEnum

import attrs
import numpy as np

from llamacli.errors import PluginError, plugin_errors
from llamacli.kernels import ggml_packings, grid_packings, ir
from llamacli.kernels.digest import packing_digest
from llamacli.kernels.isa import isa
from llamacli.kernels.packing_formats import INTEGER_PACKINGS, FloatPacking, IntegerPacking, Packing
from llamacli.quantization import FORMATS, QuantFormat, TensorType

_log = logging.getLogger(__name__)


assert ggml_packings, "its import registers packings of integers"
assert grid_packings, "its import registers those of small types"


def packings() -> dict[TensorType, Packing]:
    """Packings of the core's tensor types that have kernels."""
    return packings_for(isa())


@functools.cache
def packings_for(instructions: str) -> dict[TensorType, Packing]:
    """Packings for an instruction set; only those of floats depend on it."""
    f16 = FloatPacking(TensorType.F16, np.uint16, lambda b, address: [ir.load_f16(b, address)], "f16")
    bf16 = FloatPacking(TensorType.BF16, np.uint16, ir.load_bf16_pairs, "bf16", adjacent=2)
    if instructions == "avx512bf16":
        bf16 = attrs.evolve(bf16, load_columns=_load_words, activation="bf16_pairs")
    if instructions == "amx":
        f16 = FloatPacking(TensorType.F16, np.uint16, None, "f16_split", block=32)
        bf16 = FloatPacking(TensorType.BF16, np.uint16, None, "bf16_pairs", adjacent=2, block=32)
    return {
        TensorType.F32: FloatPacking(TensorType.F32, np.float32, lambda b, address: [ir.load(b, address, ir.F32X16)]),
        TensorType.F16: f16,
        TensorType.BF16: bf16,
        **INTEGER_PACKINGS,
    }


def _load_words(b: ir.Builder, address: ir.Value) -> list[ir.Value]:
    """Load two columns of bfloat16 as a vector of int32."""
    return [ir.load(b, address, ir.I32X16)]


def packing_of(kind: int) -> Packing | None:
    """Packing of a tensor type, None without kernels.

    Raises PluginError if the type is a plugin's and its packing cannot be made, or does not fit its blocks.
    """
    fmt = FORMATS.get(kind)
    if fmt is None or fmt.packing is None:
        return packings().get(kind)  # type: ignore[call-overload]  # an IntEnum is found by its number
    return _described(fmt)


def kinds() -> list[IntEnum]:
    """Tensor types that have kernels; broken packings of plugins are logged."""
    found: list[IntEnum] = list(packings())
    for fmt in FORMATS.values():
        if fmt.packing is not None:
            try:
                _described(fmt)
            except PluginError as error:
                _log.warning("%s", error)
            else:
                found.append(fmt.type)
    return found


def integer_kinds() -> list[IntEnum]:
    """Tensor types whose kernels multiply integers."""
    return [kind for kind in kinds() if isinstance(packing_of(kind), IntegerPacking)]


@functools.cache
def _described(fmt: QuantFormat) -> IntegerPacking:
    """Packing of a plugin, named after its type and code hash."""
    assert fmt.packing
    what = f"the packing of tensor type {fmt.name}"
    with plugin_errors(what):
        packing = fmt.packing()
        if not isinstance(packing, IntegerPacking):
            raise PluginError(f"{what} is {packing!r}, expected an IntegerPacking")
        if (packing.block, packing.file_bytes) != (fmt.block_size, fmt.type_size):
            raise PluginError(
                f"{what} has blocks of {packing.block} numbers in {packing.file_bytes} bytes; "
                f"those of the type have {fmt.block_size} in {fmt.type_size}"
            )
        return attrs.evolve(packing, name=f"{re.sub(r'[^A-Za-z0-9_]', '_', fmt.name)}_{packing_digest(packing)}")

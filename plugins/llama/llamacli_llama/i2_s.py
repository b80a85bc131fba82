"""Tensor type I2_S: two bits a weight, one scale a matrix.

Microsoft's BitNet b1.58 2B4T is published in it. The layout is that of `quantize_i2_s` with ACT_PARALLEL, in
src/ggml-bitnet-mad.cpp of github.com/microsoft/BitNet (16da220ae2b5): byte i of 32 has the codes of the weights i,
i + 32, i + 64 and i + 96, highest bits first; 0, 1 and 2 stand for -1, 0 and 1. The float32 scale is the first of 32
bytes behind the matrix, which is read as its parameter's `scale`.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.plugin import QuantFormat, hookimpl

LLAMACLI_API = 1

_ONE = 0x3C00  # as float16


class Added(IntEnum):
    """Number of the type in files."""

    I2_S = 36


def dequantize(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 [n_rows, row_bytes] to float32 [n_rows, n_columns], without the scale."""
    codes = raw.reshape(len(raw), -1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
    return (codes.astype(np.float32) - 1).reshape(len(raw), -1)


def decode(block: Any, codes: Any, fields: Any) -> None:
    """Codes of a block; compiled by Numba."""
    for group in range(4):
        for i in range(32):
            codes[32 * group + i] = block[i] >> (6 - 2 * group) & 3
    fields[0] = _ONE


def packing() -> Any:
    """Description that kernels are made from."""
    from llamacli.plugin import F16, IntegerPacking

    return IntegerPacking(
        file_bytes=32, groups=4, planes=(2,), fields={"one": (F16, 1)}, decode=decode, bias_bits=0,
        factors=lambda fields: (fields["one"][0], None), terms=lambda fields, group: [(None, None)],
    )  # fmt: skip


@hookimpl
def register_quant_formats(register):  # type: ignore[no-untyped-def]
    """Register the type."""
    register(QuantFormat(Added.I2_S, 128, 32, dequantize, packing=packing, trailer=32))

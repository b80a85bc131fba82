"""Packing weights: from rows of a file's blocks to tiles of 16 rows; see `formats.py` for the layout."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, njit
from numba.core import types
from numba.extending import overload

from llamacli.kernels import simd
from llamacli.kernels.elementwise import share
from llamacli.kernels.formats import ROWS, FloatPacking, IntegerPacking, packings
from llamacli.kernels.jit import RUN, Kernel, record
from llamacli.kernels.team import STEP, Team
from llamacli.quantization import TensorType

PACK = record(
    "raw", "row_bytes", "n_rows", "packed", "n_tiles", "n_blocks", "n_columns", "exponent", "unbounded"
)  # fmt: skip
"""`raw`: n_rows rows of row_bytes bytes, a whole number of blocks each; `packed`: n_tiles tiles of n_blocks blocks.
`exponent`: the bits that are all set in floats that are NaN or infinite; int64 `unbounded` is set to 1 if any float is.
"""

_EXPONENT_F16 = 0x7C00
_EXPONENTS = {TensorType.F32: 0x7F800000, TensorType.BF16: 0x7F80}

_MOST_CODES, _MOST_FIELDS = 256, 24


def pack(
    team: Team, kind: TensorType, raw: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8], n_columns: int
) -> bool:
    """Pack rows, uint8 [n_rows, row_bytes], into uint8 [n_tiles, n_blocks, n_bytes]; rows that are missing become 0.

    Returns whether all floats and scales are finite.
    """
    raw = np.ascontiguousarray(raw)
    args, run, steps, unbounded = np.zeros(1, PACK), np.zeros(1, RUN), np.zeros(1, STEP), np.zeros(1, np.int64)
    args["raw"], args["row_bytes"], args["n_rows"] = raw.ctypes.data, raw.shape[1], len(raw)
    args["packed"], args["n_tiles"], args["n_blocks"] = packed.ctypes.data, packed.shape[0], packed.shape[1]
    args["n_columns"], args["exponent"] = n_columns, _EXPONENTS.get(kind, _EXPONENT_F16)
    args["unbounded"] = unbounded.ctypes.data
    steps["function"], steps["args"] = pack_kernel(kind).address, args.ctypes.data
    team.run(steps, 0, 1, run)
    return not unbounded[0]


def pack_kernel(kind: TensorType) -> Kernel:
    """The kernel that packs weights of a format."""
    packing = packings()[kind]
    if isinstance(packing, FloatPacking):
        return _pack_floats(np.dtype(packing.item).itemsize)
    return _pack_integers(int(kind))


@functools.cache
def _pack_floats(size: int) -> Kernel:
    """The kernel for floats of 2 or 4 bytes; a tile is a unit of work."""
    columns = FloatPacking.COLUMNS
    item = np.uint16 if size == 2 else np.uint32

    def pack_floats(args: int, run: int, thread: int, n_threads: int) -> None:
        a = carray(simd.pointer(args), 1, PACK)[0]
        first, last = share(a.n_tiles, thread, n_threads)
        n_padded = a.n_blocks * columns
        exponent, highest = item(a.exponent), item(0)
        for tile in range(first, last):
            out = carray(simd.pointer(a.packed + tile * n_padded * ROWS * size), (n_padded, ROWS), item)
            for lane in range(ROWS):
                row = tile * ROWS + lane
                n_columns = a.n_columns if row < a.n_rows else 0
                x = carray(simd.pointer(a.raw + min(row, a.n_rows - 1) * a.row_bytes), a.n_columns, item)
                for i in range(n_columns):
                    out[i, lane] = x[i]
                for i in range(n_columns, n_padded):
                    out[i, lane] = 0
                for i in range(n_columns):  # apart from the copying, for this becomes vector code
                    highest = max(highest, x[i] & exponent)
        if highest == exponent:
            carray(simd.pointer(a.unbounded), 1, np.int64)[0] = 1

    return Kernel(pack_floats, f"_{size}")


def _decode(kind: Any, block: Any, codes: Any, fields: Any) -> None:
    """The decoder of a format, by its number."""


@overload(_decode, prefer_literal=True)
def _overload_decode(kind: Any, block: Any, codes: Any, fields: Any) -> Any:
    if not isinstance(kind, types.IntegerLiteral):
        return None
    decode = njit(inline="always")(_integer_packing(kind.literal_value).decode)

    def call(kind: Any, block: Any, codes: Any, fields: Any) -> None:
        decode(block, codes, fields)

    return call


def _integer_packing(kind: int) -> IntegerPacking:
    packing = packings()[TensorType(kind)]
    assert isinstance(packing, IntegerPacking)
    return packing


@functools.cache
def _pack_integers(kind: int) -> Kernel:
    """The kernel for one format of integers; a tile is a unit of work.

    4 codes of a row are a 32-bit word, and so is each row's part of a vector: planes are made of whole words.
    """
    packing = _integer_packing(kind)
    planes, groups, file_bytes, n_bytes = packing.planes, packing.groups, packing.file_bytes, packing.n_bytes
    sizes = tuple(np.dtype(field.item).itemsize for field, count in packing.fields.values() for _ in range(count))
    block, field_words, n_planes, n_fields = packing.block, packing.field_bytes // 4, len(planes), len(sizes)

    def pack_integers(args: int, run: int, thread: int, n_threads: int) -> None:
        a = carray(simd.pointer(args), 1, PACK)[0]
        first, last = share(a.n_tiles, thread, n_threads)
        codes, fields = np.zeros(_MOST_CODES, np.uint8), np.zeros(_MOST_FIELDS, np.uint16)
        word = codes.view(np.uint32)
        exponent, unbounded = np.uint16(a.exponent), False
        for unit in range(first * a.n_blocks, last * a.n_blocks):
            tile, number = unit // a.n_blocks, unit % a.n_blocks
            address = a.packed + unit * n_bytes
            out = carray(simd.pointer(address), n_bytes // 4, np.uint32)
            for lane in range(ROWS):
                row = tile * ROWS + lane
                if row < a.n_rows:
                    source = a.raw + row * a.row_bytes + number * file_bytes
                    _decode(kind, carray(simd.pointer(source), file_bytes, np.uint8), codes, fields)
                else:
                    codes[:block] = 0
                    fields[:n_fields] = 0
                at = field_words + lane
                for group in range(groups):
                    lowest = 0
                    for plane in range(n_planes):
                        bits = planes[plane]
                        mask = np.uint32(((1 << bits) - 1) * 0x01010101)
                        for i in range(bits):
                            joined = np.uint32(0)
                            for part in range(8 // bits):
                                code = word[8 * group + bits * part + i] >> np.uint32(lowest) & mask
                                joined |= code << np.uint32(bits * part)
                            out[at] = joined
                            at += ROWS
                        lowest += bits
                place = address
                for i in range(n_fields):
                    if sizes[i] == 2:
                        carray(simd.pointer(place + 2 * lane), 1, np.uint16)[0] = fields[i]
                        unbounded |= fields[i] & exponent == exponent
                    else:
                        carray(simd.pointer(place + lane), 1, np.uint8)[0] = np.uint8(fields[i])
                    place += ROWS * sizes[i]
        if unbounded:
            carray(simd.pointer(a.unbounded), 1, np.int64)[0] = 1

    return Kernel(pack_integers, f"_{TensorType(kind).name}")

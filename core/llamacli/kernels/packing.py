"""Weight repacking: rows of file blocks to the tiles of `packing_formats.py`."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.kernels import simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import record
from llamacli.kernels.packing_formats import ROWS, FloatPacking, IntegerPacking
from llamacli.kernels.registry import packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.kernels.work import share
from llamacli.quantization import TensorType

PACK = record(
    "raw", "row_bytes", "n_raw", "packed", "n_tiles", "n_blocks", "n_columns", "exponent", "unbounded", "scratch"
)  # fmt: skip
"""`raw`: n_raw rows of row_bytes bytes, a whole number of blocks each; `packed`: n_tiles tiles of n_blocks blocks.
`exponent`: the bits that are all set in NaN and infinity, where weights are floats; int64 `unbounded` is set to
1 if any float or scale is. `scratch`: _SCRATCH bytes for each thread.
"""

_SCRATCH, _CODES = 1024, 256
"""Bytes of a decoded block, and of its codes; behind these are its fields."""

_EXPONENTS: dict[IntEnum, int] = {TensorType.F32: 0x7F800000, TensorType.F16: 0x7C00, TensorType.BF16: 0x7F80}


def pack(team: Team, kind: IntEnum, raw: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8], n_columns: int) -> bool:
    """Pack rows of a file into tiles.

    `raw` is uint8 [n_rows, row_bytes], `packed` uint8 [n_tiles, n_blocks, n_bytes]; missing rows become 0. Returns
    whether all floats and scales are finite.
    """
    raw, unbounded = np.ascontiguousarray(raw), np.zeros(1, np.int64)
    run_kernel(
        team, pack_kernel(kind), PACK, raw=raw, row_bytes=raw.shape[1], n_raw=len(raw), packed=packed,
        n_tiles=packed.shape[0], n_blocks=packed.shape[1], n_columns=n_columns, exponent=_EXPONENTS.get(kind, 0),
        unbounded=unbounded, scratch=np.zeros((team.n_threads, _SCRATCH), np.uint8),
    )  # fmt: skip
    return not unbounded[0]


def pack_kernel(kind: IntEnum) -> Kernel:
    """Kernel that packs weights of a format."""
    packing = packing_of(kind)
    if isinstance(packing, FloatPacking):
        return _pack_floats(np.dtype(packing.item).itemsize, packing.adjacent, packing.block)
    assert isinstance(packing, IntegerPacking)
    return _pack_integers(packing)


@functools.cache
def _pack_floats(size: int, adjacent: int, columns: int) -> Kernel:
    """Packing kernel for floats of 2 or 4 bytes.

    A block has `columns` columns, of which `adjacent` lie side by side. A tile is a unit of work.
    """
    item = np.uint16 if size == 2 else np.uint32

    def pack_floats(args: int, run: int, thread: int, n_threads: int) -> None:
        a = carray(simd.pointer(args), 1, PACK)[0]
        first, last = share(a.n_tiles, thread, n_threads)
        n_padded = a.n_blocks * columns
        exponent, highest = item(a.exponent), item(0)
        for tile in range(first, last):
            place = simd.pointer(a.packed + tile * n_padded * ROWS * size)
            out = carray(place, (n_padded // adjacent, ROWS, adjacent), item)
            for lane in range(ROWS):
                row = tile * ROWS + lane
                n_columns = a.n_columns if row < a.n_raw else 0
                x = carray(simd.pointer(a.raw + min(row, a.n_raw - 1) * a.row_bytes), a.n_columns, item)
                for i in range(n_columns):
                    out[i // adjacent, lane, i % adjacent] = x[i]
                for i in range(n_columns, n_padded):
                    out[i // adjacent, lane, i % adjacent] = 0
                for i in range(n_columns):  # a loop of its own, which LLVM vectorizes
                    highest = max(highest, x[i] & exponent)
        if highest == exponent:
            carray(simd.pointer(a.unbounded), 1, np.int64)[0] = 1

    return Kernel(pack_floats, f"_{size}_{adjacent}_{columns}")


@functools.cache
def _pack_integers(packing: IntegerPacking) -> Kernel:
    """Packing kernel for an integer format.

    A tile is a unit of work. 4 codes of a row are a 32-bit word, and so is each row's part of a vector: planes are made
    of whole words.
    """
    assert packing.block <= _CODES
    assert sum(count for _, count in packing.fields.values()) <= (_SCRATCH - _CODES) // 4
    planes, groups, file_bytes, n_bytes = packing.planes, packing.groups, packing.file_bytes, packing.n_bytes
    stored = [field for field, count in packing.fields.values() for _ in range(count)]
    sizes, exponents = tuple(field.size for field in stored), tuple(field.exponent for field in stored)
    decode = _decoder(packing)
    block, field_words, n_planes, n_fields = packing.block, packing.field_bytes // 4, len(planes), len(sizes)

    def pack_integers(args: int, run: int, thread: int, n_threads: int) -> None:
        a = carray(simd.pointer(args), 1, PACK)[0]
        first, last = share(a.n_tiles, thread, n_threads)
        scratch = a.scratch + thread * _SCRATCH  # arrays of its own would need Numba's allocator
        codes = carray(simd.pointer(scratch), block, np.uint8)
        word = carray(simd.pointer(scratch), block // 4, np.uint32)
        fields = carray(simd.pointer(scratch + _CODES), n_fields, np.uint32)
        unbounded = False
        for unit in range(first * a.n_blocks, last * a.n_blocks):
            tile, number = unit // a.n_blocks, unit % a.n_blocks
            address = a.packed + unit * n_bytes
            out = carray(simd.pointer(address), n_bytes // 4, np.uint32)
            for lane in range(ROWS):
                row = tile * ROWS + lane
                if row < a.n_raw:
                    source = a.raw + row * a.row_bytes + number * file_bytes
                    decode(carray(simd.pointer(source), file_bytes, np.uint8), codes, fields)
                else:
                    codes[:] = 0
                    fields[:] = 0
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
                    if sizes[i] == 4:
                        carray(simd.pointer(place + 4 * lane), 1, np.uint32)[0] = fields[i]
                    elif sizes[i] == 2:
                        carray(simd.pointer(place + 2 * lane), 1, np.uint16)[0] = np.uint16(fields[i])
                    else:
                        carray(simd.pointer(place + lane), 1, np.uint8)[0] = np.uint8(fields[i])
                    unbounded |= exponents[i] != 0 and fields[i] & exponents[i] == exponents[i]
                    place += ROWS * sizes[i]
        if unbounded:
            carray(simd.pointer(a.unbounded), 1, np.int64)[0] = 1

    return Kernel(pack_integers, f"_{packing.name}")


def _decoder(packing: IntegerPacking) -> Any:
    decode = njit(inline="always")(packing.decode)
    if packing.decode_table is None:
        return decode
    table = packing.decode_table()

    def decode_with_table(block: Any, codes: Any, fields: Any) -> None:
        decode(block, codes, fields, table)

    return njit(decode_with_table)
